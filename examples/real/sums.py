"""Sums of two numbers from 10 to 49, as questions to a chat model; 500 of them are held out. Countdown as questions.

Both orders of a pair are in the same split, so that 17 + 25 cannot give away 25 + 17.
"""

from collections.abc import Iterator
from itertools import combinations_with_replacement
from random import Random
from typing import Any

from proximo.errors import ConfigError
from proximo.recipes import countdown as problems

SMALLEST, LARGEST = 10, 49
HELD_OUT_PAIRS = 250
"""Pairs of unequal numbers, each of which is two questions."""


def rows(split: str = "train") -> Iterator[dict[str, str]]:
    """`prompt` and `answer` of each sum of a split, always in the same order.

    Raises ConfigError for a split other than `train` and `held_out`.
    """
    if split not in ("train", "held_out"):
        raise ConfigError(f"the split of the sums is train or held_out, got {split!r}")
    pairs = list(combinations_with_replacement(range(SMALLEST, LARGEST + 1), 2))
    Random(0).shuffle(pairs)
    held_out = {*[(a, b) for a, b in pairs if a != b][:HELD_OUT_PAIRS]}
    for a, b in pairs:
        if ((a, b) in held_out) == (split == "held_out"):
            for first, second in {(a, b): None, (b, a): None}:
                question = f"What is {first} + {second}? Answer with the number only."
                yield {"prompt": question, "answer": str(first + second)}


def countdown(num_rows: int, seed: int, split: str = "train") -> Iterator[dict[str, Any]]:
    """`prompt`, `nums` and `target`: two or three numbers up to 20, to be combined with plus and minus."""
    for row in problems.rows(num_rows, seed, split=split, signs="+-"):
        numbers = ", ".join(map(str, row["nums"]))
        asked = f"Make {row['target']} of the numbers {numbers} with + and -, each once. Answer with the sum only."
        yield {"prompt": asked, "nums": row["nums"], "target": row["target"]}
