"""The grammar of the embedded example: sentences are written from frames and read back by the same frames.

A sentence is one clause, or two clauses of parts joined by "and" (both praise or both blame) or by "but" (one praises,
the other blames).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, lru_cache

from proximo.recipes.reviews.words import (
    ADVERBS,
    BAD,
    DISLIKED,
    GOOD,
    KINDS,
    LIKED,
    SUMMARIES,
    WHEN,
    WHO,
)


class SentenceRole(IntEnum):
    """Where in a review a sentence belongs."""

    OPENING = 0
    PART = 1
    VERDICT = 2
    CLOSING = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)  # one object per frame: hashed by identity, which is fast
class Frame:
    """A clause with open slots. `sign`: 1 keeps the opinion of the word in the slot, -1 reverses it."""

    role: SentenceRole
    text: str
    sign: int = 1
    states: int = 0
    """The opinion (1 or -1) of a frame that needs no opinion word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clause:
    """A clause that was read: its frame, the word in each slot, and its opinion (1 good, -1 bad, 0 none)."""

    frame: Frame
    words: Mapping[str, str]
    opinion: int


FRAMES = (
    Frame(role=SentenceRole.OPENING, text="{who} {did} the {noun} {when}"),
    Frame(role=SentenceRole.OPENING, text="this is about the {noun}"),
    Frame(role=SentenceRole.OPENING, text="{who} had high hopes for the {noun}"),
    Frame(role=SentenceRole.OPENING, text="a friend told me about the {noun}"),
    Frame(role=SentenceRole.PART, text="the {part} {is} {adjective}"),
    Frame(role=SentenceRole.PART, text="the {parts} {are} {adjective}"),
    Frame(role=SentenceRole.PART, text="the {part} {is} {adverb} {adjective}"),
    Frame(role=SentenceRole.PART, text="the {parts} {are} {adverb} {adjective}"),
    Frame(role=SentenceRole.PART, text="the {part} {is} not {adjective}", sign=-1),
    Frame(role=SentenceRole.PART, text="the {parts} {are} not {adjective}", sign=-1),
    Frame(role=SentenceRole.PART, text="{who} {feel} the {any_part}"),
    Frame(role=SentenceRole.VERDICT, text="{summary} it {is} a {a_adjective} {noun}"),
    Frame(role=SentenceRole.VERDICT, text="{summary} it {is} an {an_adjective} {noun}"),
    Frame(role=SentenceRole.VERDICT, text="{summary} the {noun} {is} {adjective}"),
    Frame(role=SentenceRole.VERDICT, text="{summary} the {noun} {is} not {adjective}", sign=-1),
    Frame(role=SentenceRole.VERDICT, text="{summary} {who} {feel} the {noun}"),
    Frame(role=SentenceRole.CLOSING, text="i recommend it", states=1),
    Frame(role=SentenceRole.CLOSING, text="it is worth the money", states=1),
    Frame(role=SentenceRole.CLOSING, text="you should try it", states=1),
    Frame(role=SentenceRole.CLOSING, text="it made my day", states=1),
    Frame(role=SentenceRole.CLOSING, text="i do not recommend it", states=-1),
    Frame(role=SentenceRole.CLOSING, text="it is not worth the money", states=-1),
    Frame(role=SentenceRole.CLOSING, text="you should avoid it", states=-1),
    Frame(role=SentenceRole.CLOSING, text="i want my money back", states=-1),
)

PRAISE = frozenset((*GOOD, *LIKED, *(word for kind in KINDS for word in kind.good)))
BLAME = frozenset((*BAD, *DISLIKED, *(word for kind in KINDS for word in kind.bad)))
PARTS = frozenset(word for kind in KINDS for word in (*kind.part, *kind.parts))
ADJECTIVES = tuple(word for word in sorted(PRAISE | BLAME) if word not in (*LIKED, *DISLIKED))
OPINION_SLOTS = frozenset(("adjective", "a_adjective", "an_adjective", "feel"))

SLOTS: Mapping[str, tuple[str, ...]] = {
    "who": WHO,
    "when": WHEN,
    "did": tuple(kind.did for kind in KINDS),
    "noun": tuple(noun for kind in KINDS for noun in kind.nouns),
    "part": tuple(word for kind in KINDS for word in kind.part),
    "parts": tuple(word for kind in KINDS for word in kind.parts),
    "any_part": tuple(sorted(PARTS)),
    "is": ("is", "was"),
    "are": ("are", "were"),
    "adverb": ADVERBS,
    "adjective": ADJECTIVES,
    "a_adjective": tuple(word for word in ADJECTIVES if word[0] not in "aeiou"),
    "an_adjective": tuple(word for word in ADJECTIVES if word[0] in "aeiou"),
    "feel": (*LIKED, *DISLIKED),
    "summary": SUMMARIES,
}
"""Every word that fits each slot."""


def opinion_of(word: str) -> int:
    """1 for a word that praises, -1 for one that blames, 0 for any other."""
    return (word in PRAISE) - (word in BLAME)


@cache
def slots_of(frame: Frame) -> tuple[str, ...]:
    """The names of the open slots, in order."""
    return tuple(re.findall(r"{(\w+)}", frame.text))


def _pattern(frame: Frame) -> re.Pattern[str]:
    def alternatives(slot: re.Match[str]) -> str:
        return f"(?P<{slot[1]}>{'|'.join(SLOTS[slot[1]])})"

    return re.compile(re.sub(r"{(\w+)}", alternatives, frame.text))


def _by_first_word() -> dict[str, tuple[tuple[Frame, re.Pattern[str]], ...]]:
    """The possible frames of a clause by its first word, so that few have to be tried."""
    patterns_by_word: dict[str, list[tuple[Frame, re.Pattern[str]]]] = {}
    for frame in FRAMES:
        beginning = frame.text.split()[0]
        beginnings = SLOTS[beginning[1:-1]] if beginning.startswith("{") else (beginning,)
        pattern = _pattern(frame)
        for word in dict.fromkeys(text.split()[0] for text in beginnings):
            patterns_by_word.setdefault(word, []).append((frame, pattern))
    return {word: tuple(patterns) for word, patterns in patterns_by_word.items()}


PATTERNS = _by_first_word()
BETWEEN = re.compile(r"(?<=\.) ")
LONE_I = re.compile(r"\bi\b")


def read_clause(text: str) -> Clause | None:
    """`text` (lower case, no full stop) as a clause; None if no frame fits."""
    for frame, pattern in PATTERNS.get(text.partition(" ")[0], ()):
        match = pattern.fullmatch(text)
        if match is not None:
            words = match.groupdict()
            voiced = sum(opinion_of(word) for slot, word in words.items() if slot in OPINION_SLOTS)
            return Clause(frame=frame, words=words, opinion=frame.states or frame.sign * voiced)
    return None


@lru_cache(maxsize=1 << 16)
def read_sentence(sentence: str) -> tuple[Clause, ...]:
    """The clauses of a sentence, in any capitals and with or without full stop; empty if it cannot be read."""
    text = sentence.removesuffix(".").lower()
    for conjunction, product in ((" and ", 1), (" but ", -1)):
        halves = text.split(conjunction)
        if len(halves) == 2:
            clauses = tuple(clause for clause in map(read_clause, halves) if clause is not None)
            parts = all(clause.frame.role is SentenceRole.PART for clause in clauses)
            joined = len(clauses) == 2 and parts and clauses[0].opinion * clauses[1].opinion == product
            return clauses if joined else ()
    clause = read_clause(text)
    return () if clause is None else (clause,)


@lru_cache(maxsize=1 << 16)
def words_in(sentence: str) -> frozenset[str]:
    """The words in the slots of a sentence; none if it cannot be read."""
    return frozenset(word for clause in read_sentence(sentence) for word in clause.words.values())


def write_sentence(text: str) -> str:
    """`text` (lower case) as a sentence: a capital at the start, "I" for "i", a full stop at the end."""
    upright = LONE_I.sub("I", text)
    return upright[:1].upper() + upright[1:] + "."


def split_sentences(review: str) -> list[str]:
    """The sentences of a review, each with its full stop; what follows the last full stop counts as one more."""
    return [sentence for sentence in BETWEEN.split(review.strip()) if sentence]


def well_formed(sentence: str) -> bool:
    """Whether the grammar reads the sentence and would write it with the same letters."""
    return bool(read_sentence(sentence)) and sentence == write_sentence(sentence.removesuffix(".").lower())
