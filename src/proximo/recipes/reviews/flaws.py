"""Flaws of reviews for the embedded example: each function puts one flaw into a draft.

First flaws of content, length and order, which leave every sentence well formed; then flaws of form; at the end, text
that is not a review. All randomness comes from the caller's `Random`.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from proximo.recipes.reviews.drafts import Draft, new_sentence, plain_thing
from proximo.recipes.reviews.grammar import PARTS, SLOTS, SentenceRole, opinion_of, read_sentence, write_sentence
from proximo.recipes.reviews.words import KINDS

Flaw = Callable[[Random, Draft], Draft]
"""Puts one flaw into a draft; returns it unchanged if the flaw does not apply."""


def change_mind(rng: Random, draft: Draft) -> Draft:
    """One sentence with an opinion is rewritten with the opposite one (or another one, for two clauses)."""
    candidates = [
        index for index, sentence in enumerate(draft.sentences) if any(c.opinion for c in read_sentence(sentence))
    ]
    if not candidates:
        return draft
    index = rng.choice(candidates)
    clause = read_sentence(draft.sentences[index])[0]
    others = draft.sentences[:index] + draft.sentences[index + 1 :]
    praise = 0.0 if clause.opinion > 0 else 1.0
    sentence = new_sentence(rng, draft.thing, others, role=clause.frame.role, praise=praise)
    return _with_sentence(draft, index, sentence)


def stray(rng: Random, draft: Draft) -> Draft:
    """At least one sentence is about a thing of another kind; each other sentence with probability one half."""
    kind = rng.choice([kind for kind in KINDS if kind is not draft.thing.kind])
    noun = rng.choice(kind.nouns)
    other = plain_thing(kind, noun)
    sentences = list(draft.sentences)
    first = rng.randrange(len(sentences))
    for index, sentence in enumerate(sentences):
        clauses = read_sentence(sentence)
        if clauses and (index == first or rng.random() < 0.5):
            role, praise = clauses[0].frame.role, 1.0 if clauses[0].opinion > 0 else 0.0
            sentences[index] = new_sentence(rng, other, sentences, role=role, praise=praise)
    return replace(draft, sentences=tuple(sentences))


def repeat_sentence(rng: Random, draft: Draft) -> Draft:
    """One sentence appears twice in a row, in place of its neighbour."""
    if len(draft.sentences) < 2:
        return draft
    index = rng.randrange(len(draft.sentences) - 1)
    return _with_sentence(draft, index + 1, draft.sentences[index])


def repeat_word(rng: Random, draft: Draft) -> Draft:
    """One part is named in most places where a part fits."""
    read = [clause for sentence in draft.sentences for clause in read_sentence(sentence)]
    favourites = [word for clause in read for word in clause.words.values() if word in PARTS]
    for favourite in rng.sample(favourites, len(favourites)):
        sentences = tuple(_favouring(rng, sentence, favourite) for sentence in draft.sentences)
        if sentences != draft.sentences:
            return replace(draft, sentences=sentences)
    return draft


def _favouring(rng: Random, sentence: str, favourite: str) -> str:
    def swap(slot: str, word: str) -> str:
        same = favourite in SLOTS[slot] and opinion_of(favourite) == opinion_of(word)
        return favourite if same and rng.random() < 0.8 else word

    return _rewrite(sentence, swap)


def _rewrite(sentence: str, swap: Callable[[str, str], str]) -> str:
    """The sentence with each slot's word replaced by `swap(slot, word)`; unreadable sentences stay as they are."""
    clauses = read_sentence(sentence)
    texts = [c.frame.text.format(**{slot: swap(slot, word) for slot, word in c.words.items()}) for c in clauses]
    conjunction = " but " if " but " in sentence else " and "
    return write_sentence(conjunction.join(texts)) if texts else sentence


def shuffle_sentences(rng: Random, draft: Draft) -> Draft:
    """The sentences in another order."""
    return replace(draft, sentences=tuple(rng.sample(draft.sentences, len(draft.sentences))))


def shorten(rng: Random, draft: Draft) -> Draft:
    """Only one or two of the sentences."""
    keep = sorted(rng.sample(range(len(draft.sentences)), min(rng.choice((1, 2, 2)), len(draft.sentences))))
    return replace(draft, sentences=tuple(draft.sentences[index] for index in keep))


def lengthen(rng: Random, draft: Draft) -> Draft:
    """One to three more sentences of every sort, in order."""
    sentences = list(draft.sentences)
    for _ in range(rng.choice((1, 1, 2, 3))):
        role = rng.choice((SentenceRole.PART, SentenceRole.PART, SentenceRole.VERDICT, SentenceRole.CLOSING))
        praise = float(any(c.opinion > 0 for s in sentences for c in read_sentence(s)))
        sentence = new_sentence(rng, draft.thing, sentences, role=role, praise=praise)
        roles = [read_sentence(s)[0].frame.role if read_sentence(s) else SentenceRole.OPENING for s in sentences]
        sentences.insert(sum(other <= role for other in roles), sentence)
    return replace(draft, sentences=tuple(sentences))


def drop_capital(rng: Random, draft: Draft) -> Draft:
    """Small letters: at least one sentence begins with one, the rest half the time."""
    first = rng.randrange(len(draft.sentences))
    small = [s[:1].lower() + s[1:] if n == first or rng.random() < 0.5 else s for n, s in enumerate(draft.sentences)]
    return replace(draft, sentences=tuple(small))


def drop_word(rng: Random, draft: Draft) -> Draft:
    """One sentence lacks a word."""

    def edit(words: list[str]) -> list[str]:
        index = rng.randrange(len(words))
        return words[:index] + words[index + 1 :]

    return _edit_words(rng, draft, edit)


def mix_words(rng: Random, draft: Draft) -> Draft:
    """The words of one sentence in another order."""
    return _edit_words(rng, draft, lambda words: rng.sample(words, len(words)))


def misspell(rng: Random, draft: Draft) -> Draft:
    """In one sentence a word lacks its beginning or its end, or runs into the next word."""

    def edit(words: list[str]) -> list[str]:
        index = rng.randrange(len(words))
        cut = rng.randrange(1, max(2, len(words[index])))
        kept = words[index][:cut] if rng.random() < 0.5 else words[index][cut:]
        if rng.random() < 0.5 and index + 1 < len(words):
            return [*words[:index], kept + words[index + 1], *words[index + 2 :]]
        return [*words[:index], kept, *words[index + 1 :]]

    return _edit_words(rng, draft, edit)


def drop_stop(rng: Random, draft: Draft) -> Draft:
    """One sentence lacks its full stop."""
    index = rng.randrange(len(draft.sentences))
    return _with_sentence(draft, index, draft.sentences[index].removesuffix("."))


def cut_off(rng: Random, draft: Draft) -> Draft:
    """The last sentence breaks off."""
    words = draft.sentences[-1].removesuffix(".").split(" ")
    return _with_sentence(draft, len(draft.sentences) - 1, " ".join(words[: rng.randrange(1, max(2, len(words)))]))


def salad(rng: Random, draft: Draft) -> Draft:
    """All words of the review in another order."""
    words = draft.text.replace(".", " .").split(" ")
    return replace(draft, sentences=(" ".join(rng.sample(words, len(words))),))


def one_word(rng: Random, draft: Draft) -> Draft:
    """A word of the review, over and over."""
    word = rng.choice(draft.text.removesuffix(".").split(" "))
    return replace(draft, sentences=(" ".join([word] * rng.randrange(1, 25)),))


def one_sentence(rng: Random, draft: Draft) -> Draft:
    """A sentence of the review, over and over."""
    return replace(draft, sentences=(rng.choice(draft.sentences),) * rng.randrange(2, 6))


def nothing(_rng: Random, draft: Draft) -> Draft:
    """No text, or only a full stop."""
    return replace(draft, sentences=(".",))


def _with_sentence(draft: Draft, index: int, sentence: str) -> Draft:
    return replace(draft, sentences=(*draft.sentences[:index], sentence, *draft.sentences[index + 1 :]))


def _edit_words(rng: Random, draft: Draft, edit: Callable[[list[str]], list[str]]) -> Draft:
    index = rng.randrange(len(draft.sentences))
    words = draft.sentences[index].removesuffix(".").split(" ")
    return _with_sentence(draft, index, " ".join(edit(words)) + ".")
