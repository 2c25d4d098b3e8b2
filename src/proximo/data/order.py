"""The order of rows as a function of (seed, epoch), and batches as a function of position. No state, no stream."""

import hashlib
from functools import lru_cache

import numpy as np


def shuffled(num_rows: int, *, seed: int, purpose: str, epoch: int = 0) -> list[int]:
    """A permutation of 0..num_rows-1 that depends on the arguments alone.

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


def batch_at(batch: int, *, batch_size: int, num_rows: int, seed: int, num_epochs: int | None = None) -> list[int]:
    """The rows of batch number `batch`, counted from 0.

    With `num_epochs` the last batch ends with the last epoch, so it may be smaller; a batch beyond it is a ValueError.
    """
    position = batch * batch_size
    count = batch_size
    if num_epochs is not None:
        count = min(count, num_epochs * num_rows - position)
        if count <= 0:
            raise ValueError(f"batch {batch} lies beyond {num_epochs} epochs of {num_rows} rows")
    return rows_at(position, count, num_rows=num_rows, seed=seed)


def num_batches(num_rows: int, *, batch_size: int, num_epochs: int) -> int:
    """How many batches cover the epochs; the last one may be smaller."""
    return -(-num_rows * num_epochs // batch_size)


@lru_cache(maxsize=4)
def _order(num_rows: int, seed: int, purpose: str, epoch: int) -> np.ndarray:
    key = hashlib.sha256(f"{purpose}/{seed}/{epoch}".encode()).digest()[:16]
    draws = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(num_rows)
    order = np.argsort(draws, kind="stable")
    order.setflags(write=False)
    return order
