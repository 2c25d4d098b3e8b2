"""Phases of one data set have the published boundaries and share no row; held-out rows are left out of training."""

from itertools import product

import pytest

from proximo.config.data import DataConfig, SourceConfig
from proximo.data.order import DataPhase, hold_out, phase_indices, split_boundaries

VECTORS = {
    10: [0, 2, 6, 10],
    11: [0, 3, 7, 11],
    13: [0, 3, 8, 13],
    7: [0, 1, 4, 7],
    3: [0, 1, 2, 3],
    1: [0, 1, 1, 1],
}
"""DeepSpeed-Chat's boundaries for "2,4,4", by executing its function."""


def test_boundaries_of_2_4_4_are_those_of_deepspeed_chat() -> None:
    assert {num_rows: split_boundaries(num_rows, (2, 4, 4)) for num_rows in VECTORS} == VECTORS
    assert split_boundaries(13, (0.2, 0.4, 0.4)) == split_boundaries(13, (20, 40, 40)) == VECTORS[13]


def test_boundaries_rise_from_0_to_the_number_of_rows() -> None:
    shares: list[tuple[float, ...]] = [(0, 1, 1), (1, 0, 1), (1, 1, 1, 1, 1, 1), (1,), (0, 0, 3), (5, 1e-9, 5)]
    for num_rows, proportions in product((1, 2, 3, 5, 8, 100), shares):
        boundaries = split_boundaries(num_rows, proportions)
        assert (boundaries[0], boundaries[-1]) == (0, num_rows)
        assert boundaries == sorted(boundaries)


def test_the_phases_hold_each_row_once() -> None:
    parts = [phase_indices(101, DataPhase(proportions=(2, 4, 4), part=part)) for part in range(3)]
    assert sorted(index for part in parts for index in part) == list(range(101))
    assert [len(part) for part in parts] == [21, 40, 40]
    assert parts[0] != list(range(21))


def test_another_seed_of_the_phases_cuts_otherwise() -> None:
    first = phase_indices(100, DataPhase(proportions=(1, 1), part=0))
    assert first != phase_indices(100, DataPhase(proportions=(1, 1), part=0, seed=1))
    assert first == phase_indices(100, DataPhase(proportions=(1, 1), part=0))


def test_with_a_seed_the_parts_have_the_rows_of_deepspeed_chat() -> None:
    """Its order of ten rows at its seed 1234, which is RandomState(1234) of numpy, cut at 0, 2, 6 and 10."""
    parts = [phase_indices(10, DataPhase(proportions=(2, 4, 4), part=part, seed=1234)) for part in range(3)]
    assert parts == [[7, 2], [9, 1, 0, 8], [4, 5, 6, 3]]


def test_held_out_rows_and_the_rest_are_everything_in_file_order() -> None:
    rest, held_out = hold_out(50, 5, seed=1)
    assert len(held_out) == 5
    assert rest == sorted(rest)
    assert held_out == sorted(held_out)
    assert sorted(rest + held_out) == list(range(50))
    assert hold_out(50, 5, seed=2)[1] != held_out
    assert hold_out(50, 0, seed=1) == (list(range(50)), [])


@pytest.mark.parametrize(
    ("num_rows", "asked", "held"),
    [(100, 20, 20), (100, 21, 20), (60, 500, 12), (9, 5, 1), (3, 1, 1), (2, 7, 1), (1, 7, 0), (0, 7, 0), (3, 0, 0)],
)
def test_at_most_a_fifth_is_held_out_and_one_row_where_there_are_two(num_rows: int, asked: int, held: int) -> None:
    rest, held_out = hold_out(num_rows, asked, seed=0)
    assert (len(rest), len(held_out)) == (num_rows - held, held)


@pytest.mark.parametrize("proportions", [(1,), (0, 0), (-1, 2), (float("nan"), 1), (float("inf"), 1)])
def test_proportions_that_share_nothing_are_refused(proportions: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="at least 2|all be 0|equal to 0|finite number"):
        DataConfig(sources=(SourceConfig(path="a"),), proportions=proportions, phase=0)
