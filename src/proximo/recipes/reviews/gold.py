"""The gold score of the embedded example: the quality of a review, in closed form, from its text.

The score is the reviewer's opinion of the thing times the quality of the text:

    gold = (1 + 4 opinion) / 5 * form * topic * variety * shape

The first factor is the reviewer's stars (1 to 5) out of five; each of the others is 1 for a flawless review. So gold
is in [0, 1], every flawless review full of praise gets 1, and text that is not a review gets 0. Because the factors
multiply, one property cannot make up for another: the best sentence repeated four times gets 0.25.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from proximo.errors import DataError
from proximo.recipes.reviews.grammar import PARTS, read_sentence, split_sentences, well_formed
from proximo.recipes.reviews.words import KINDS, Kind

SHORTEST = 3
LONGEST = 4
"""How many sentences a review should have."""
WORD = re.compile(r"[a-z]+")
COMPONENTS = ("opinion", "form", "topic", "variety", "shape")

KIND_OF_NOUN: Mapping[str, Kind] = {noun: kind for kind in KINDS for noun in kind.nouns}
KIND_OF_WORD: Mapping[str, Kind] = {
    word: kind for kind in KINDS for word in (kind.did.split()[0], *kind.part, *kind.parts, *kind.good, *kind.bad)
}
"""Words other than nouns that fit one kind of thing and no other."""


def gold_score(prompt: str, response: str) -> float:
    """The score of a review, in [0, 1]."""
    parts = gold_components(prompt, response)
    stars = 1 + 4 * parts["opinion"]
    return stars / 5 * parts["form"] * parts["topic"] * parts["variety"] * parts["shape"]


def gold_components(prompt: str, response: str) -> dict[str, float]:
    """The five properties of a review, each in [0, 1] and each computed without the others."""
    noun = thing_of(prompt)
    sentences = split_sentences(response)
    return {
        "opinion": opinion(sentences),
        "form": form(sentences),
        "topic": topic(noun, response),
        "variety": variety(sentences),
        "shape": shape(sentences),
    }


def gold_reward(
    prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]], **_options: Any
) -> list[dict[str, float]]:
    """The gold score as a reward function: `score` and its components, for each response."""
    del metadata
    pairs = zip(prompts, responses, strict=True)
    return [{"score": gold_score(*pair), **gold_components(*pair)} for pair in pairs]


def thing_of(prompt: str) -> str:
    """The noun that the prompt asks about.

    Raises:
        DataError: the prompt names no thing of the example, or more than one.
    """
    nouns = {word for word in _words(prompt) if word in KIND_OF_NOUN}
    if len(nouns) != 1:
        raise DataError(
            "the gold score of the reviews needs a prompt that names one thing of the example "
            f"({', '.join(sorted(KIND_OF_NOUN)[:4])}, ...), but {prompt!r} names {len(nouns)}: "
            "score these prompts with another reward"
        )
    return nouns.pop()


def opinion(sentences: Sequence[str]) -> float:
    """Share of praise among the opinions (negation reverses one); 0 if there is no opinion."""
    opinions = [clause.opinion for sentence in sentences for clause in read_sentence(sentence) if clause.opinion]
    return opinions.count(1) / len(opinions) if opinions else 0.0


def form(sentences: Sequence[str]) -> float:
    """Share of sentences that the grammar reads and that have a capital and a full stop."""
    return sum(map(well_formed, sentences)) / len(sentences) if sentences else 0.0


def topic(noun: str, response: str) -> float:
    """Share of fitting words among those that belong to one thing or kind; halved if the thing is not named."""
    words = _words(response)
    kind = KIND_OF_NOUN[noun]
    fits = [word == noun for word in words if word in KIND_OF_NOUN]
    fits += [KIND_OF_WORD[word] is kind for word in words if word in KIND_OF_WORD]
    return sum(fits) / len(fits) * (1.0 if noun in words else 0.5) if fits else 0.0


def variety(sentences: Sequence[str]) -> float:
    """The smaller of two shares: distinct sentences among all, and distinct parts among those named."""
    content = [word for word in _words(" ".join(sentences)) if word in PARTS]
    spoken = [sentence.lower() for sentence in sentences]
    return min(_distinct(spoken), _distinct(content)) if spoken else 0.0


def shape(sentences: Sequence[str]) -> float:
    """The smaller of two: right length (3 to 4 sentences), and share of neighbours in order, opening to closing."""
    number = len(sentences)
    length = min(number / SHORTEST, 1.0, max(0.0, 1 - (number - LONGEST) / 4))
    roles = [clauses[0].role for clauses in map(read_sentence, sentences) if clauses]
    in_order = [before <= after for before, after in pairwise(roles)]
    return min(length, sum(in_order) / len(in_order) if in_order else 1.0)


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _distinct(items: Sequence[str]) -> float:
    return len(set(items)) / len(items) if items else 1.0
