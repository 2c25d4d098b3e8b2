"""Generates the data sets of the embedded example: reviews for SFT, noisy preference pairs, prompts.

Row i depends only on (seed, i), so any slice of a data set can be made without the rest. Things of the held-out split
appear in no row of the training split.
"""

from collections.abc import Iterator
from functools import cache
from operator import itemgetter
from random import Random

from proximo.errors import ConfigError
from proximo.recipes.reviews import flaws
from proximo.recipes.reviews.drafts import Draft, Thing, clean_draft
from proximo.recipes.reviews.flaws import Flaw
from proximo.recipes.reviews.gold import gold_score
from proximo.recipes.reviews.words import KINDS, PROMPTS

Row = dict[str, str]

SPLITS = ("train", "held_out")
HELD_OUT_EVERY = 5
"""One thing in five is held out."""
NOISE_BLOCK = 100
"""Each block of this many rows has the same number of flipped pairs, so the noise rate is exact in it."""
SMALLEST_GAP = 0.02
"""The least difference in gold between the two reviews of a pair."""

FORM_FLAWS = (flaws.drop_capital, flaws.drop_word, flaws.mix_words, flaws.drop_stop, flaws.misspell)
FLAWS_COMPARED: tuple[tuple[Flaw, float], ...] = (
    (flaws.change_mind, 6),
    (flaws.stray, 6),
    (flaws.repeat_word, 1),
    *((flaw, 1) for flaw in FORM_FLAWS),
    (flaws.cut_off, 0.75),
    (flaws.repeat_sentence, 1),
    (flaws.shuffle_sentences, 0.75),
    (flaws.shorten, 0.75),
    (flaws.lengthen, 1.5),
)
NO_REVIEWS = (flaws.salad, flaws.one_word, flaws.one_sentence, flaws.nothing)
PRAISES = (0.05, 0.15, 0.4, 0.9)
"""Probabilities of praise of the reviewers, who are equally frequent."""


FLAW_RATES: tuple[tuple[Flaw, float], ...] = (
    (flaws.stray, 0.05),
    (flaws.repeat_word, 0.05),
    (flaws.lengthen, 0.05),
    (flaws.repeat_sentence, 0.06),
    (flaws.shuffle_sentences, 0.06),
    (flaws.shorten, 0.08),
)
"""Flaws of content, of length and order, with their probabilities; they are drawn independently, in this order."""
FORM_RATE = 0.08
"""The probability of one flaw of form, which comes after those."""
CUT_RATE = 0.04


def sft_rows(num_rows: int, seed: int) -> list[Row]:
    """`prompt` and `response`: reviews by all sorts of reviewers about things of the training split."""
    rows = []
    for row in range(num_rows):
        rng = _rng(seed, "sft", row)
        thing, prompt = _draw_prompt(rng, "train")
        rows.append({"prompt": prompt, "response": mixed_draft(rng, thing).text})
    return rows


def preference_rows(num_rows: int, seed: int, *, noise: float = 0.15) -> list[Row]:
    """`prompt`, `chosen` and `rejected`: two reviews of one thing; without noise the one of higher gold is chosen.

    Ties are drawn again. Only `flipped_rows` shows which rows are flipped.
    """
    flipped = flipped_rows(num_rows, seed, noise=noise)
    rows = []
    for row in range(num_rows):
        rng = _rng(seed, "pairs", row)
        thing, prompt = _draw_prompt(rng, "train")
        better, worse = _ordered_pair(rng, thing, prompt)
        chosen, rejected = (worse, better) if flipped[row] else (better, worse)
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows


def flipped_rows(num_rows: int, seed: int, *, noise: float = 0.15) -> list[bool]:
    """Which preference pairs are in the wrong order: exactly a share `noise` of every 100 rows, in random places.

    Raises:
        ConfigError: `noise` is not a whole number of hundredths from 0 to 1.
    """
    num_flipped = round(noise * NOISE_BLOCK)
    if not 0 <= num_flipped <= NOISE_BLOCK or abs(num_flipped / NOISE_BLOCK - noise) > 1e-9:
        raise ConfigError(f"noise must be a whole number of hundredths from 0 to 1, got {noise}: round it")
    flipped: list[bool] = []
    for block in range(-(-num_rows // NOISE_BLOCK)):
        chosen = set(_rng(seed, "noise", block).sample(range(NOISE_BLOCK), num_flipped))
        flipped.extend(index in chosen for index in range(NOISE_BLOCK))
    return flipped[:num_rows]


def prompt_rows(num_rows: int, seed: int, split: str = "train") -> list[Row]:
    """Rows with `prompt`. The splits `train` and `held_out` have different things; other data sets use `train`."""
    return [{"prompt": _draw_prompt(_rng(seed, split, row), split)[1]} for row in range(num_rows)]


@cache
def things(split: str) -> tuple[Thing, ...]:
    """All things of a split: one in five of each kind, spread over its nouns and traits, is held out.

    Raises:
        ConfigError: the split is unknown.
    """
    if split not in SPLITS:
        raise ConfigError(f"the split of the reviews must be one of {', '.join(SPLITS)}, got {split!r}")
    return tuple(thing for thing, held_out in _all_things() if held_out == (split == "held_out"))


def mixed_draft(rng: Random, thing: Thing) -> Draft:
    """A review by a reviewer of random inclination, with flaws at their rates; most have some flaw."""
    draft = clean_draft(rng, thing, praise=rng.choice(PRAISES))
    form = rng.choice(FORM_FLAWS)
    for flaw, rate in (*FLAW_RATES, (form, FORM_RATE), (flaws.cut_off, CUT_RATE)):
        if rng.random() < rate:
            draft = flaw(rng, draft)
    return draft


def _ordered_pair(rng: Random, thing: Thing, prompt: str) -> tuple[str, str]:
    while True:
        texts = [draft.text for draft in _rivals(rng, thing)]
        scored = [(gold_score(prompt, text), text) for text in texts]
        (low, worse), (high, better) = sorted(scored, key=itemgetter(0))
        if high - low >= SMALLEST_GAP:
            return better, worse


def _rivals(rng: Random, thing: Thing) -> tuple[Draft, Draft]:
    """Two reviews of one thing, or a clean review and the same with one flaw or turned into something else."""
    draw = rng.random()
    if draw < 0.65:
        return mixed_draft(rng, thing), mixed_draft(rng, thing)
    clean = clean_draft(rng, thing, praise=rng.choice(PRAISES))
    if draw < 0.96:
        flaw = rng.choices([flaw for flaw, _ in FLAWS_COMPARED], weights=[weight for _, weight in FLAWS_COMPARED])[0]
        return clean, flaw(rng, clean)
    return clean, rng.choice(NO_REVIEWS)(rng, clean)


def _draw_prompt(rng: Random, split: str) -> tuple[Thing, str]:
    thing = rng.choice(things(split))
    return thing, rng.choice(PROMPTS).format(thing=thing.name)


def _all_things() -> Iterator[tuple[Thing, bool]]:
    for kind in KINDS:
        for row, noun in enumerate(kind.nouns):
            for column, trait in enumerate(kind.traits):
                thing = Thing(kind=kind, noun=noun, name=trait.format(noun))
                yield thing, (row + column) % HELD_OUT_EVERY == 0


def _rng(seed: int, purpose: str, position: int) -> Random:
    return Random(f"{seed}/{purpose}/{position}")
