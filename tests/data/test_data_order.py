"""The order of rows is a function of (seed, epoch), batches are one of position, and nothing is skipped or repeated."""

import hashlib
from itertools import pairwise

import pytest

from proximo.data.order import epoch_order, rows_at, shuffled


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 1000])
def test_an_epoch_visits_every_row_once(num_rows: int) -> None:
    assert sorted(epoch_order(num_rows, seed=3, epoch=5)) == list(range(num_rows))


def test_the_order_is_the_one_of_the_first_release() -> None:
    """Resumed runs and the phases of old runs depend on it."""
    assert epoch_order(10, seed=0, epoch=0) == [6, 9, 7, 2, 1, 5, 8, 4, 3, 0]
    digest = hashlib.sha256(repr(epoch_order(1000, seed=17, epoch=3)).encode()).hexdigest()
    assert digest.startswith("cc85484fcfcb107e")


def test_epochs_seeds_and_purposes_give_unrelated_orders() -> None:
    base = epoch_order(1000, seed=0, epoch=0)
    others = [
        epoch_order(1000, seed=0, epoch=1),
        epoch_order(1000, seed=1, epoch=0),
        shuffled(1000, seed=0, purpose="phases"),
    ]
    for other in others:
        fixed_points = sum(a == b for a, b in zip(base, other, strict=True))
        assert fixed_points < 12  # about Poisson(1)
        follow = set(pairwise(base)) & set(pairwise(other))
        assert len(follow) < 12


@pytest.mark.parametrize(("num_rows", "batch_size"), [(10, 3), (3, 10), (7, 7), (1, 4)])
def test_batches_walk_through_epoch_after_epoch_without_a_gap(num_rows: int, batch_size: int) -> None:
    starts = range(0, 5 * num_rows, batch_size)
    batches = [rows_at(start, batch_size, num_rows=num_rows, seed=4) for start in starts]
    assert {len(batch) for batch in batches} == {batch_size}
    walked = [row for batch in batches for row in batch]
    epochs = [row for epoch in range(20) for row in epoch_order(num_rows, seed=4, epoch=epoch)]
    assert walked == epochs[: len(walked)]


def test_a_batch_does_not_depend_on_what_was_asked_before() -> None:
    late = rows_at(1234, 5, num_rows=100, seed=9)
    for epoch in range(20):
        epoch_order(100, seed=9, epoch=epoch)
    assert rows_at(1234, 5, num_rows=100, seed=9) == late
    late.append(0)
    assert rows_at(1234, 5, num_rows=100, seed=9) == late[:-1]


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        rows_at(0, 1, num_rows=0, seed=0)
