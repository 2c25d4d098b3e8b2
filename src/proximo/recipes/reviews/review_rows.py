"""The data sets of the embedded example: reviews for SFT, noisy preference pairs, prompts.

Reviews and pairs lie in files beside this one: well-written reviews and flawed ones, of things of the training split
alone. The things of the held-out split appear in prompts only.
"""

import json
import lzma
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

from proximo.errors import ConfigError
from proximo.recipes.reviews.words import KINDS, PROMPTS

Row = dict[str, str]

SPLITS = ("train", "held_out")
HELD_OUT_EVERY = 5
"""One thing in five is held out."""
NOISE_BLOCK = 100
"""Each block of this many rows has the same number of flipped pairs, so the noise rate is exact in it."""


def sft_rows(num_rows: int) -> list[Row]:
    """`prompt` and `response`: reviews by all sorts of reviewers; most have some flaw."""
    return [{"prompt": prompt, "response": response} for prompt, response in _stored("texts", num_rows)]


def preference_rows(num_rows: int, *, noise: float = 0.15) -> list[Row]:
    """`prompt`, `chosen` and `rejected`: two reviews of one thing; without noise the one of higher gold is chosen.

    Only `flipped_rows` shows which rows are flipped.
    """
    flipped = flipped_rows(num_rows, noise=noise)
    return [
        {"prompt": prompt, "chosen": (better, worse)[flip], "rejected": (worse, better)[flip]}
        for (prompt, better, worse), flip in zip(_stored("pairs", num_rows), flipped, strict=True)
    ]


def flipped_rows(num_rows: int, *, noise: float = 0.15) -> list[bool]:
    """Which preference pairs are in the wrong order: exactly a share `noise` of every 100 rows, in random places.

    Raises:
        ConfigError: `noise` is not a whole number of hundredths from 0 to 1.
    """
    num_flipped = round(noise * NOISE_BLOCK)
    if not 0 <= num_flipped <= NOISE_BLOCK or abs(num_flipped / NOISE_BLOCK - noise) > 1e-9:
        raise ConfigError(f"noise must be a whole number of hundredths from 0 to 1, got {noise}: round it")
    flipped: list[bool] = []
    for block in range(-(-num_rows // NOISE_BLOCK)):
        chosen = set(Random(f"1/noise/{block}").sample(range(NOISE_BLOCK), num_flipped))
        flipped.extend(index in chosen for index in range(NOISE_BLOCK))
    return flipped[:num_rows]


def prompt_rows(num_rows: int, seed: int, split: str = "train") -> list[Row]:
    """Rows with `prompt`. The splits `train` and `held_out` have different things; other data sets use `train`.

    Row i depends only on (seed, i).
    """
    generators = [Random(f"{seed}/{split}/{row}") for row in range(num_rows)]
    # The thing is drawn before the sentence that names it.
    return [
        {"prompt": draw.choice(PROMPTS).format(thing=thing)}
        for draw in generators
        for thing in [draw.choice(things(split))]
    ]


@cache
def things(split: str) -> tuple[str, ...]:
    """All things of a split, such as `small kettle`: one in five of each kind, spread over its nouns and traits, is
    held out.

    Raises:
        ConfigError: the split is unknown.
    """
    if split not in SPLITS:
        raise ConfigError(f"the split of the reviews must be one of {', '.join(SPLITS)}, got {split!r}")
    return tuple(
        trait.format(noun)
        for kind in KINDS
        for row, noun in enumerate(kind.nouns)
        for column, trait in enumerate(kind.traits)
        if ((row + column) % HELD_OUT_EVERY == 0) == (split == "held_out")
    )


def _stored(name: str, num_rows: int) -> list[list[str]]:
    """The first rows of a file. Raises ConfigError if it has fewer."""
    with lzma.open(Path(__file__).with_name(f"{name}.jsonl.xz"), "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in islice(file, num_rows)]
    if len(rows) < num_rows:
        raise ConfigError(f"the reviews have {len(rows):,} rows of {name}, and num_rows is {num_rows:,}: take fewer")
    return rows
