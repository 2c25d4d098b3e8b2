"""Writes clean reviews for the embedded example; `flaws.py` adds flaws.

All randomness comes from the caller's `Random`, so a review is a function of its seed.
"""

from bisect import bisect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    """An open slot of a frame and the words that fit it: those of the kind of thing, and those for all kinds."""

    name: str
    words: tuple[str, ...]
    own: tuple[str, ...]
    general: tuple[str, ...]
    said_once: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """The frames that can express an opinion, each with its slots. Computed once for all reviews of a thing."""

    frames: tuple[tuple[Frame, tuple[_Slot, ...]], ...]
    cumulative_weights: tuple[float, ...]
    word_sets: frozenset[frozenset[str]]
    """The words of each slot that is filled once per review."""


def _new_clause(
    rng: Random, thing: Thing, used: set[str], *, role: SentenceRole, opinion: int
) -> tuple[str, Collection[str]]:
    """The clause, and the words in its slots."""
    choice = _choice(thing, role, opinion)
    frames, weights = choice.frames, choice.cumulative_weights
    if any(map(used.issuperset, choice.word_sets)):
        fresh = [each for each in frames if not any(slot.said_once and used.issuperset(slot.words) for slot in each[1])]
        if fresh:
            frames, weights = tuple(fresh), _cumulative_weights(frame for frame, _ in fresh)
    frame, slots = frames[bisect(weights, rng.random() * weights[-1], 0, len(frames) - 1)]
    words = {slot.name: _fill(rng, slot, used) for slot in slots}
    return frame.text.format_map(words), words.values()


@cache
def _choice(thing: Thing, role: SentenceRole, opinion: int) -> _Choice:
    possible = [frame for frame in FRAMES if frame.role is role and frame.states in (0, opinion)]
    frames = tuple((frame, _slots(frame, thing, opinion * frame.sign)) for frame in possible)
    once = (frozenset(slot.words) for _, slots in frames for slot in slots if slot.said_once)
    return _Choice(frames=frames, cumulative_weights=_cumulative_weights(possible), word_sets=frozenset(once))


def _cumulative_weights(frames: Iterable[Frame]) -> tuple[float, ...]:
    """Cumulative weights of the frames; negation is rarer than other frames."""
    return tuple(accumulate(0.4 if frame.sign < 0 else 1.0 for frame in frames))


def _slots(frame: Frame, thing: Thing, opinion: int) -> tuple[_Slot, ...]:
    own = {*thing.kind.good, *thing.kind.bad}
    filled = [(name, _fitting_words(thing, name, opinion)) for name in slots_of(frame)]
    return tuple(
        _Slot(
            name=name,
            words=words,
            own=tuple(word for word in words if word in own),
            general=tuple(word for word in words if word not in own),
            said_once=name in CONTENT_SLOTS,
        )
        for name, words in filled
    )


def _fill(rng: Random, slot: _Slot, used: set[str]) -> str:
    if not slot.said_once:
        return _pick(rng, slot.words)
    own: Sequence[str] = slot.own
    general: Sequence[str] = slot.general
    if not used.isdisjoint(slot.words):
        fresh_own = [word for word in own if word not in used]
        fresh_general = [word for word in general if word not in used]
        if fresh_own or fresh_general:
            own, general = fresh_own, fresh_general
    return _pick(rng, own if own and (not general or rng.random() < OWN_WORD_SHARE) else general)


def _pick(rng: Random, words: Sequence[str]) -> str:
    """`rng.choice(words)` with the same draws in a third of the time; most of the generator's time is spent here."""
    number = len(words)
    bits = number.bit_length()
    index = rng.getrandbits(bits)
    while index >= number:
        index = rng.getrandbits(bits)
    return words[index]


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
