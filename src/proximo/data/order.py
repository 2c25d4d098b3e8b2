"""The order of rows as a function of (seed, epoch), and rows as a function of position, without any state."""

import hashlib
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
