"""Calibration and distinct-n against numbers worked by hand."""

import math
import random

import pytest

from proximo.metrics.calibration import pair_error, probability_error
from proximo.ppo.step_metrics import distinct_fraction, repeated_fraction


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def test_the_error_is_the_weighted_gap_of_the_bins():
    sure_and_right, sure_and_wrong = logit(0.88), -logit(0.88)
    unsure_and_right = logit(0.52)
    error = pair_error([sure_and_right, sure_and_right, sure_and_right, sure_and_wrong, unsure_and_right])
    assert error == pytest.approx((1 * abs(0.52 - 1.0) + 4 * abs(0.88 - 0.75)) / 5)


def test_a_model_whose_odds_are_true_has_nearly_no_error():
    rng = random.Random(0)
    margins = []
    for _ in range(20_000):
        margin = abs(rng.gauss(0, 2))
        margins.append(margin if rng.random() < 1 / (1 + math.exp(-margin)) else -margin)
    assert (pair_error(margins) or 0.0) < 0.01
    assert (pair_error([3 * margin for margin in margins]) or 0.0) > 0.1


def test_calibration_of_ties_of_huge_margins_of_no_numbers_and_of_nothing():
    assert pair_error([0.0, 0.0]) == 0.0, "half right at even odds"
    assert pair_error([1e9, -1e9]) == 0.5
    assert pair_error([]) is None
    assert pair_error([math.nan, logit(0.88)]) == pytest.approx(0.12)
    assert pair_error([math.nan]) is None
    assert math.isnan(probability_error([0.3, math.nan], [0, 1]) or 0.0)


def test_distinct_two_counts_pairs_across_responses():
    assert distinct_fraction([[1, 2, 3], [1, 2], [5]]) == pytest.approx(2 / 3)
    assert distinct_fraction([[7, 7, 7, 7]]) == pytest.approx(1 / 3)
    assert distinct_fraction([[1, 2, 3], [1, 2]], n=3) == 1.0
    assert distinct_fraction([[1], []]) is None


def test_a_response_repeats_what_stood_in_it_before():
    assert repeated_fraction([1, 2, 3, 1, 2, 3], n=2) == pytest.approx(2 / 5), "12 23 31 12 23"
    assert repeated_fraction([7] * 13) == pytest.approx(9 / 10)
    assert repeated_fraction([1, 2, 3, 4, 5]) == repeated_fraction([1, 2, 3]) == repeated_fraction([]) == 0.0
