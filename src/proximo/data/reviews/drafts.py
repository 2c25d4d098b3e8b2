"""Writing clean reviews of the embedded example. Not the flaws that are put into them, and no scores.

Whatever is random draws from the `Random` that the caller hands over, so a review is a function of its seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from proximo.data.reviews.grammar import (
    FRAMES,
    OPINION_SLOTS,
    SLOTS,
    Frame,
    Place,
    read_sentence,
    slots_of,
    write_sentence,
)
from proximo.data.reviews.words import BAD, DISLIKED, GOOD, LIKED, Kind

OWN_WORD_SHARE = 0.35
"""How often an opinion word is one of the kind's own."""
CONTENT_SLOTS = frozenset(("part", "parts", "any_part", *OPINION_SLOTS))
"""What a clean review says once."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Thing:
    """What a review is about: `name` is "small kettle", `noun` is "kettle".

    One object per thing: hashed by identity, which is quick.
    """

    kind: Kind
    noun: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A review in the making: its sentences as they will stand."""

    thing: Thing
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        """The review."""
        return " ".join(self.sentences)


def clean_draft(rng: Random, thing: Thing, *, praise: float) -> Draft:
    """A flawless review of 3 or 4 sentences; each opinion praises with probability `praise`."""
    plan = [Place.PART, Place.VERDICT]
    if rng.random() < 0.6:
        plan.insert(0, Place.OPENING)
    if rng.random() < 0.5:
        plan.append(Place.CLOSING)
    if len(plan) == 2 or (len(plan) == 3 and rng.random() < 0.4):
        plan.insert(plan.index(Place.PART), Place.PART)
    sentences: list[str] = []
    for place in plan:
        sentences.append(new_sentence(rng, thing, sentences, place=place, praise=praise))
    return Draft(thing=thing, sentences=tuple(sentences))


def new_sentence(rng: Random, thing: Thing, before: Sequence[str], *, place: Place, praise: float) -> str:
    """A sentence that repeats no part and no opinion word of the sentences before it."""
    used = {word for sentence in before for clause in read_sentence(sentence) for word in clause.words.values()}
    first = _clause_text(rng, thing, used, place=place, opinion=_draw_opinion(rng, praise))
    if place is not Place.PART or rng.random() > 0.3:
        return write_sentence(first)
    used |= {word for clause in read_sentence(first) for word in clause.words.values()}
    opinion = _draw_opinion(rng, praise)
    second = _clause_text(rng, thing, used, place=place, opinion=opinion)
    agree = read_sentence(first)[0].opinion == opinion
    return write_sentence(f"{first} {'and' if agree else 'but'} {second}")


def _draw_opinion(rng: Random, praise: float) -> int:
    return 1 if rng.random() < praise else -1


def _clause_text(rng: Random, thing: Thing, used: set[str], *, place: Place, opinion: int) -> str:
    possible = _possible_frames(place, opinion)
    fresh = [frame for frame in possible if _has_fresh_words(frame, thing, used, opinion)] or possible
    # Negation is rarer in reviews than the frames are.
    frame = rng.choices(fresh, weights=[0.4 if frame.sign < 0 else 1.0 for frame in fresh])[0]
    words = {slot: _fill(rng, thing, used, slot=slot, opinion=opinion * frame.sign) for slot in slots_of(frame)}
    return frame.text.format(**words)


def _has_fresh_words(frame: Frame, thing: Thing, used: set[str], opinion: int) -> bool:
    return all(not used.issuperset(words) for words in _content_words(frame, thing, opinion * frame.sign))


@cache
def _possible_frames(place: Place, opinion: int) -> tuple[Frame, ...]:
    return tuple(frame for frame in FRAMES if frame.place is place and frame.states in (0, opinion))


@cache
def _content_words(frame: Frame, thing: Thing, opinion: int) -> tuple[tuple[str, ...], ...]:
    """For each slot that is filled once per review, the words that fit."""
    return tuple(_fitting_words(thing, slot, opinion) for slot in slots_of(frame) if slot in CONTENT_SLOTS)


def _fill(rng: Random, thing: Thing, used: set[str], *, slot: str, opinion: int) -> str:
    words = _fitting_words(thing, slot, opinion)
    if slot not in CONTENT_SLOTS:
        return rng.choice(words)
    fresh = [word for word in words if word not in used] or list(words)
    own = [word for word in fresh if word in (*thing.kind.good, *thing.kind.bad)]
    general = [word for word in fresh if word not in own]
    return rng.choice(own if own and (not general or rng.random() < OWN_WORD_SHARE) else general)


@cache
def _fitting_words(thing: Thing, slot: str, opinion: int) -> tuple[str, ...]:
    """The words that can stand in the slot of a clause about the thing, where it thinks `opinion`."""
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
