"""Generates countdown problems: numbers, a target, and an expression that reaches it.

Row i depends only on (seed, i). Whether a problem is held out depends only on the problem, so the training split never
contains a held-out problem, for any seeds.
"""

import hashlib
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from proximo.errors import ConfigError

SPLITS = ("train", "held_out")
HELD_OUT_EVERY = 5
"""One problem in five is held out."""
LARGEST_TARGET = 99


def rows(
    num_rows: int,
    seed: int,
    *,
    split: str = "train",
    counts: Sequence[int] = (2, 3),
    largest: int = 20,
    signs: str = "+-*",
    careless: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """`prompt` (`3 5 7 = 26`), `response` (`3*7+5`, one that is right), and `nums` and `target` for a verifier.

    Each number is used once, with the operators of `signs` and, where 3 * (5 + 7) needs them, brackets; targets are
    from 1 to 99. `careless` is the share of responses that use the numbers but usually miss the target, so that a
    fine-tuned model has something left to learn.

    Raises:
        ConfigError: the split is unknown, or the other options allow no problem.
    """
    if split not in SPLITS:
        raise ConfigError(f"the split of the countdown problems must be one of {', '.join(SPLITS)}, got {split!r}")
    can_be = counts and set(counts) <= {2, 3} and signs and set(signs) <= {*"+-*"}
    if not can_be or largest < 2 or not 0 <= careless <= 1:
        raise ConfigError(
            f"counts must be 2, 3 or both, signs some of + - *, largest at least 2 and careless a share from 0 to 1, "
            f"got {list(counts)}, {signs!r}, {largest} and {careless}"
        )
    for row in range(num_rows):
        rng = Random(f"{seed}/{split}/{row}")
        while True:
            numbers = [rng.randint(1, largest) for _ in range(rng.choice(list(counts)))]
            expression, target = _combine(rng, numbers, signs)
            shown = sorted(numbers)
            if 1 <= target <= LARGEST_TARGET and is_held_out(shown, target) == (split == "held_out"):
                break
        if rng.random() < careless:
            expression, _ = _combine(rng, numbers, signs)
        prompt = f"{' '.join(map(str, shown))} = {target}\n"
        yield {"prompt": prompt, "response": expression, "nums": shown, "target": target}


def is_held_out(numbers: Sequence[int], target: int) -> bool:
    """Whether a problem belongs to the held-out split; the order of its numbers does not matter."""
    key = f"{sorted(numbers)} {target}".encode()
    return hashlib.blake2b(key, digest_size=4).digest()[0] % HELD_OUT_EVERY == 0


def _combine(rng: Random, numbers: Sequence[int], signs: str) -> tuple[str, int]:
    """An expression of all numbers in a random order, and its value: (a o b) o c, or a o b."""
    first, *rest = rng.sample(list(numbers), len(numbers))
    text, value, is_sum = str(first), first, False
    for number in rest:
        sign = rng.choice(signs)
        if sign == "*":
            text, value, is_sum = f"{f'({text})' if is_sum else text}*{number}", value * number, False
        else:
            text, value, is_sum = f"{text}{sign}{number}", value + number if sign == "+" else value - number, True
    return text, value
