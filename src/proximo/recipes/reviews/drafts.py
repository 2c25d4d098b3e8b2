"""Writes clean reviews for the embedded example; `flaws.py` adds flaws.

All randomness comes from the caller's `Random`, so a review is a function of its seed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from proximo.recipes.reviews.grammar import (
    FRAMES,
    OPINION_SLOTS,
    SLOTS,
    Frame,
    SentenceRole,
    slots_of,
    words_in,
    write_sentence,
)
from proximo.recipes.reviews.words import BAD, DISLIKED, GOOD, LIKED, Kind

OWN_WORD_SHARE = 0.35
"""How often an opinion word is specific to the kind of thing."""
CONTENT_SLOTS = frozenset(("part", "parts", "any_part", *OPINION_SLOTS))
"""Slots whose words a clean review uses only once."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Thing:
    """The subject of a review: `name` is "small kettle", `noun` is "kettle".

    There is one object per thing, hashed by identity, which is fast.
    """

    kind: Kind
    noun: str
    name: str


@cache
def plain_thing(kind: Kind, noun: str) -> Thing:
    """A thing without a trait: "kettle"."""
    return Thing(kind=kind, noun=noun, name=noun)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """An unfinished review: its sentences in order."""

    thing: Thing
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        """The sentences of the review, with a space between them."""
        return " ".join(self.sentences)


def clean_draft(rng: Random, thing: Thing, *, praise: float) -> Draft:
    """A flawless review of 3 or 4 sentences; each opinion praises with probability `praise`."""
    plan = [SentenceRole.PART, SentenceRole.VERDICT]
    if rng.random() < 0.6:
        plan.insert(0, SentenceRole.OPENING)
    if rng.random() < 0.5:
        plan.append(SentenceRole.CLOSING)
    if len(plan) == 2 or (len(plan) == 3 and rng.random() < 0.4):
        plan.insert(plan.index(SentenceRole.PART), SentenceRole.PART)
    sentences: list[str] = []
    for role in plan:
        sentences.append(new_sentence(rng, thing, sentences, role=role, praise=praise))
    return Draft(thing=thing, sentences=tuple(sentences))


def new_sentence(rng: Random, thing: Thing, before: Sequence[str], *, role: SentenceRole, praise: float) -> str:
    """A sentence that repeats no part and no opinion word of the sentences before it."""
    used = set().union(*map(words_in, before))
    opinion = _draw_opinion(rng, praise)
    first, words = _new_clause(rng, thing, used, role=role, opinion=opinion)
    if role is not SentenceRole.PART or rng.random() > 0.3:
        return write_sentence(first)
    used.update(words)
    second_opinion = _draw_opinion(rng, praise)
    second, _ = _new_clause(rng, thing, used, role=role, opinion=second_opinion)
    return write_sentence(f"{first} {'and' if opinion == second_opinion else 'but'} {second}")


def _draw_opinion(rng: Random, praise: float) -> int:
    return 1 if rng.random() < praise else -1


def _new_clause(
    rng: Random, thing: Thing, used: set[str], *, role: SentenceRole, opinion: int
) -> tuple[str, Collection[str]]:
    """The clause, and the words in its slots."""
    possible = _frames(role, opinion)
    fresh = [frame for frame in possible if not _is_used_up(frame, thing, opinion, used)] or possible
    # Negation is rarer than other frames.
    frame = rng.choices(fresh, [0.4 if frame.sign < 0 else 1.0 for frame in fresh])[0]
    words = {slot: _fill(rng, thing, slot, opinion * frame.sign, used) for slot in slots_of(frame)}
    return frame.text.format_map(words), words.values()


@cache
def _frames(role: SentenceRole, opinion: int) -> list[Frame]:
    """The frames that can express an opinion."""
    return [frame for frame in FRAMES if frame.role is role and frame.states in (0, opinion)]


def _is_used_up(frame: Frame, thing: Thing, opinion: int, used: set[str]) -> bool:
    return any(
        used.issuperset(_fitting_words(thing, slot, opinion * frame.sign))
        for slot in slots_of(frame)
        if slot in CONTENT_SLOTS
    )


def _fill(rng: Random, thing: Thing, slot: str, opinion: int, used: set[str]) -> str:
    words = _fitting_words(thing, slot, opinion)
    if slot not in CONTENT_SLOTS:
        return rng.choice(words)
    words = tuple(word for word in words if word not in used) or words
    own = [word for word in words if word in thing.kind.good or word in thing.kind.bad]
    general = [word for word in words if word not in own]
    return rng.choice(own if own and (not general or rng.random() < OWN_WORD_SHARE) else general)


@cache
def _fitting_words(thing: Thing, slot: str, opinion: int) -> tuple[str, ...]:
    """The words that fit the slot of a clause about the thing with this opinion."""
    kind = thing.kind
    own = {"noun": (thing.noun,), "did": (kind.did,), "part": kind.part, "parts": kind.parts}
    if slot in own:
        return own[slot]
    if slot == "any_part":
        return (*kind.part, *kind.parts)
    if slot not in OPINION_SLOTS:
        return SLOTS[slot]
    sayable = (*GOOD, *LIKED, *kind.good) if opinion > 0 else (*BAD, *DISLIKED, *kind.bad)
    return tuple(word for word in sayable if word in SLOTS[slot])
