"""Which rows come when, as a function of seed, epoch and position: orders, batches, phases, held-out rows.

Nothing has a state. The parts into which a data set is split share no row.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


def shuffled(num_rows: int, *, seed: int, purpose: str, epoch: int = 0) -> list[int]:
    """A permutation of 0..num_rows-1 that depends only on the arguments.

    Rows are sorted by the raw output of a counter-based generator (Philox, keyed by SHA-256 of the arguments), so the
    order does not depend on the version of numpy's own shuffle. Different purposes and epochs are independent.
    """
    return _order(num_rows, seed, purpose, epoch).tolist()


def epoch_order(num_rows: int, *, seed: int, epoch: int) -> list[int]:
    """The order in which an epoch visits the rows."""
    return shuffled(num_rows, seed=seed, purpose="epoch", epoch=epoch)


def rows_at(position: int, count: int, *, num_rows: int, seed: int) -> list[int]:
    """The `count` rows from `position` on, in the endless sequence of epoch after epoch.

    `position` counts rows from the start of training. A batch may span two epochs: no row is left out of any epoch.
    """
    if num_rows < 1:
        raise ValueError("there are no rows to take a batch from")
    rows = []
    while count > 0:
        epoch, offset = divmod(position, num_rows)
        taken = _order(num_rows, seed, "epoch", epoch)[offset : offset + count].tolist()
        rows += taken
        position += len(taken)
        count -= len(taken)
    return rows


@lru_cache(maxsize=4)
def _order(num_rows: int, seed: int, purpose: str, epoch: int) -> np.ndarray:
    key = hashlib.sha256(f"{purpose}/{seed}/{epoch}".encode()).digest()[:16]
    draws = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(num_rows)
    order = np.argsort(draws, kind="stable")
    order.setflags(write=False)
    return order


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
