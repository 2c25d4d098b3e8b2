"""pass@k against the counting of all sets of k samples, and against its expectation."""

from itertools import combinations, product
from math import prod

import pytest

from proximo.ppo.task import pass_at_k


@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_it_is_the_share_of_sets_of_k_that_hold_a_solved_one(num_samples: int) -> None:
    for num_solved, k in product(range(num_samples + 1), range(1, num_samples + 1)):
        sets = list(combinations([True] * num_solved + [False] * (num_samples - num_solved), k))
        assert pass_at_k(num_samples, num_solved, k) == pytest.approx(sum(map(any, sets)) / len(sets), abs=1e-15)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_its_expectation_is_the_chance_that_k_fresh_samples_hold_a_solved_one(k: int) -> None:
    chance = 0.3
    outcomes = list(product([True, False], repeat=4))
    weights = [prod(chance if solved else 1 - chance for solved in outcome) for outcome in outcomes]
    mean = sum(w * pass_at_k(4, sum(outcome), k) for w, outcome in zip(weights, outcomes, strict=True))
    assert mean == pytest.approx(1 - (1 - chance) ** k, abs=1e-12)


def test_many_samples_lose_no_digits() -> None:
    assert pass_at_k(1000, 1, 999) == pytest.approx(0.999, abs=1e-12)


@pytest.mark.parametrize(("num_samples", "num_solved", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_impossible_counts_are_refused(num_samples: int, num_solved: int, k: int) -> None:
    with pytest.raises(ValueError, match="1 <= k <= samples"):
        pass_at_k(num_samples, num_solved, k)
