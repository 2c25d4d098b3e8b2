"""Batches under a token budget: complete, balanced, and no more of them than needed. Integers only."""

import random

import pytest

from proximo.models.batching import plan_batches


def random_lengths(seed: int) -> tuple[list[int], int]:
    rng = random.Random(seed)
    return [rng.randint(1, 40) for _ in range(rng.randint(1, 30))], rng.randint(10, 120)


@pytest.mark.parametrize("seed", range(50))
def test_every_sequence_is_in_exactly_one_batch_and_the_budget_holds(seed: int) -> None:
    lengths, budget = random_lengths(seed)
    plan = plan_batches(lengths, token_budget=budget)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    for batch in plan:
        assert batch == sorted(batch)
        assert batch
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= budget


@pytest.mark.parametrize("seed", range(50))
def test_batches_are_balanced(seed: int) -> None:
    """The longest first into the emptiest: two loads differ by no more than one sequence."""
    lengths, budget = random_lengths(seed)
    loads = [sum(lengths[i] for i in batch) for batch in plan_batches(lengths, token_budget=budget)]
    assert max(loads) - min(loads) <= max(lengths)


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ([], 10, []),
        ([3, 3, 3], 100, [[0, 1, 2]]),
        ([3, 3, 3, 3], 6, [[0, 2], [1, 3]]),
        ([9, 1, 1, 1], 12, [[0, 1, 2, 3]]),
        ([5, 4, 3, 2, 1], 8, [[0, 3, 4], [1, 2]]),
        ([50, 2, 2], 10, [[0], [1], [2]]),
        ([6, 6, 6], 10, [[0], [1], [2]]),
        ([6, 6, 6, 1, 1], 10, [[0, 3], [1, 4], [2]]),
        ([100, 4, 4, 2], 60, [[0], [1, 2, 3]]),
    ],
)
def test_small_plans_worked_by_hand(lengths: list[int], budget: int, expected: list[list[int]]) -> None:
    assert plan_batches(lengths, token_budget=budget) == expected


def test_one_sequence_over_the_budget_is_alone() -> None:
    assert [1] in plan_batches([4, 100, 4, 2], token_budget=10)


def test_a_remainder_that_does_not_fit_opens_one_more_batch() -> None:
    """18 tokens and a budget of 9 ask for two batches, but no two of three sixes fit together."""
    assert len(plan_batches([6, 6, 6], token_budget=9)) == 3
