"""Splits a data set into parts that share no row: the phases of a pipeline, and rows held out for evaluation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proximo.data.order import shuffled
from proximo.errors import ConfigError

HELD_OUT_PART = 5
"""At most one row in this many is held out, so that most of a small file is left for training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPhase:
    """One part of a data set that several stages share."""

    proportions: tuple[float, ...]
    """Relative sizes of all parts: 2, 4, 4 gives a fifth and twice two fifths."""
    part: int
    """Index of the part, counted from 0."""
    seed: int | None = None
    """Seed of DeepSpeed-Chat's shuffle before the cut; None takes Proximo's shuffle. It differs from the run's seed,
    because stages with different seeds would share rows."""

    def __post_init__(self) -> None:
        """Raises ConfigError for proportions that are not numbers from 0 up, and for an empty or unknown part."""
        if not all(math.isfinite(share) and share >= 0 for share in self.proportions) or sum(self.proportions) <= 0:
            raise ConfigError(f"proportions must be numbers from 0 up, not all 0, got {self.proportions}")
        if not 0 <= self.part < len(self.proportions) or self.proportions[self.part] == 0:
            raise ConfigError(f"part {self.part} of the proportions {self.proportions} is empty or not there")


def split_boundaries(num_rows: int, proportions: Sequence[float]) -> list[int]:
    """Boundaries of the parts, from 0 to num_rows: part k is the range from boundary k to boundary k + 1.

    Each part gets round(share * num_rows) rows; the total rounding error is then subtracted from every boundary but the
    first, so that it falls on the first part. This is the cut of DeepSpeed-Chat's `get_raw_dataset_split_index`.
    """
    total = sum(proportions)
    boundaries = [0]
    for share in proportions:
        boundaries.append(boundaries[-1] + round(share / total * num_rows))
    excess = boundaries[-1] - num_rows
    # A first part without rows cannot absorb the rounding error.
    return [0, *(max(0, boundary - excess) for boundary in boundaries[1:])]


def phase_indices(num_rows: int, phase: DataPhase) -> list[int]:
    """Row indices of a phase: its range of a shuffle. Together the phases hold each row once.

    With a seed the shuffle is numpy's `RandomState(seed)`, whose stream is frozen: that of DeepSpeed-Chat.
    """
    boundaries = split_boundaries(num_rows, phase.proportions)
    if phase.seed is None:
        order = shuffled(num_rows, seed=0, purpose="phases")
    else:
        order = np.random.RandomState(phase.seed).permutation(num_rows).tolist()
    return order[boundaries[phase.part] : boundaries[phase.part + 1]]


def hold_out(num_rows: int, most_held_out: int, *, seed: int) -> tuple[list[int], list[int]]:
    """(rows to train on, rows held out), each in file order.

    At most a fifth of the rows is held out, but at least one if any are wanted and another row is left.
    """
    num_held_out = min(most_held_out, max(num_rows // HELD_OUT_PART, 1), num_rows - 1)
    held_out = sorted(shuffled(num_rows, seed=seed, purpose="held out")[: max(num_held_out, 0)])
    chosen = set(held_out)
    return [index for index in range(num_rows) if index not in chosen], held_out
