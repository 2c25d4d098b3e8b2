"""The grammar of the embedded example, by which the gold score reads a review.

A sentence is one clause, or two clauses of parts joined by "and" (both praise or both blame) or by "but" (one praises,
the other blames). A clause is a frame with a word in each of its slots.
"""

import re
from collections.abc import Mapping
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

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


class Frame(NamedTuple):
    """A clause with open slots. `sign`: 1 keeps the opinion of the word in the slot, -1 reverses it."""

    role: SentenceRole
    text: str
    sign: int = 1
    states: int = 0
    """The opinion (1 or -1) of a frame that needs no opinion word."""


class Clause(NamedTuple):
    """A clause that was read, and its opinion (1 good, -1 bad, 0 none)."""

    role: SentenceRole
    opinion: int


FRAMES = (
    Frame(SentenceRole.OPENING, "{who} {did} the {noun} {when}"),
    Frame(SentenceRole.OPENING, "this is about the {noun}"),
    Frame(SentenceRole.OPENING, "{who} had high hopes for the {noun}"),
    Frame(SentenceRole.OPENING, "a friend told me about the {noun}"),
    Frame(SentenceRole.PART, "the {part} {is} {adjective}"),
    Frame(SentenceRole.PART, "the {parts} {are} {adjective}"),
    Frame(SentenceRole.PART, "the {part} {is} {adverb} {adjective}"),
    Frame(SentenceRole.PART, "the {parts} {are} {adverb} {adjective}"),
    Frame(SentenceRole.PART, "the {part} {is} not {adjective}", sign=-1),
    Frame(SentenceRole.PART, "the {parts} {are} not {adjective}", sign=-1),
    Frame(SentenceRole.PART, "{who} {feel} the {any_part}"),
    Frame(SentenceRole.VERDICT, "{summary} it {is} a {a_adjective} {noun}"),
    Frame(SentenceRole.VERDICT, "{summary} it {is} an {an_adjective} {noun}"),
    Frame(SentenceRole.VERDICT, "{summary} the {noun} {is} {adjective}"),
    Frame(SentenceRole.VERDICT, "{summary} the {noun} {is} not {adjective}", sign=-1),
    Frame(SentenceRole.VERDICT, "{summary} {who} {feel} the {noun}"),
    Frame(SentenceRole.CLOSING, "i recommend it", states=1),
    Frame(SentenceRole.CLOSING, "it is worth the money", states=1),
    Frame(SentenceRole.CLOSING, "you should try it", states=1),
    Frame(SentenceRole.CLOSING, "it made my day", states=1),
    Frame(SentenceRole.CLOSING, "i do not recommend it", states=-1),
    Frame(SentenceRole.CLOSING, "it is not worth the money", states=-1),
    Frame(SentenceRole.CLOSING, "you should avoid it", states=-1),
    Frame(SentenceRole.CLOSING, "i want my money back", states=-1),
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


def _pattern(frame: Frame) -> re.Pattern[str]:
    slots = {slot: f"(?P<{slot}>{'|'.join(words)})" for slot, words in SLOTS.items()}
    return re.compile(frame.text.format_map(slots))


PATTERNS = [(frame, _pattern(frame)) for frame in FRAMES]
BETWEEN = re.compile(r"(?<=\.) ")
LONE_I = re.compile(r"\bi\b")


def read_clause(text: str) -> Clause | None:
    """`text` (lower case, no full stop) as a clause; None if no frame fits."""
    for frame, pattern in PATTERNS:
        if match := pattern.fullmatch(text):
            voiced = sum(opinion_of(word) for slot, word in match.groupdict().items() if slot in OPINION_SLOTS)
            return Clause(frame.role, frame.states or frame.sign * voiced)
    return None


@lru_cache(maxsize=1 << 16)
def read_sentence(sentence: str) -> tuple[Clause, ...]:
    """The clauses of a sentence, in any capitals and with or without full stop; empty if it cannot be read."""
    text = sentence.removesuffix(".").lower()
    for conjunction, product in ((" and ", 1), (" but ", -1)):
        halves = text.split(conjunction)
        if len(halves) == 2:
            clauses = tuple(clause for clause in map(read_clause, halves) if clause is not None)
            parts = all(clause.role is SentenceRole.PART for clause in clauses)
            joined = len(clauses) == 2 and parts and clauses[0].opinion * clauses[1].opinion == product
            return clauses if joined else ()
    clause = read_clause(text)
    return () if clause is None else (clause,)


def split_sentences(review: str) -> list[str]:
    """The sentences of a review, each with its full stop; what follows the last full stop counts as one more."""
    return [sentence for sentence in BETWEEN.split(review.strip()) if sentence]


def well_formed(sentence: str) -> bool:
    """Whether the grammar reads the sentence, and it has a capital at its start, "I" for "i", and a full stop."""
    upright = LONE_I.sub("I", sentence.removesuffix(".").lower())
    return bool(read_sentence(sentence)) and sentence == upright[:1].upper() + upright[1:] + "."
