"""Reductions: what a value is after it met others of its kind."""

import math
import random
import statistics
from itertools import pairwise

import pytest

from proximo.metrics.values import Deviation, ExponentialMean, Last, Max, Mean, Sum, combine

NUMBERS = [3.0, -1.5, 8.25, 0.0, 2.0, 2.0, -7.0]


def parts() -> list[list[float]]:
    return [NUMBERS[:1], NUMBERS[1:5], [], NUMBERS[5:]]


def combined(values):
    result = values[0]
    for value in values[1:]:
        result = combine(result, value)
    return result


def test_a_mean_of_parts_is_the_mean_of_everything_and_not_the_mean_of_means():
    short, long = Mean(total=10.0, count=1), Mean(total=9.0, count=9)
    assert combine(short, long).value == pytest.approx(1.9)
    assert combine(short, long).value != pytest.approx((10.0 + 1.0) / 2)


def test_an_exponential_mean_combines_before_the_exponential():
    both = combine(ExponentialMean(math.log(2), 1), ExponentialMean(math.log(32), 1))
    assert both.value == pytest.approx(8.0)
    assert both.value != pytest.approx((2 + 32) / 2)


def test_an_exponential_mean_that_is_out_of_range_is_infinite_and_not_an_exception():
    assert ExponentialMean(1e6, 1).value == math.inf


@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        (Mean, statistics.fmean(NUMBERS)),
        (Deviation, statistics.pstdev(NUMBERS)),
        (Max, 8.25),
    ],
)
def test_any_split_gives_what_the_whole_gives(kind, whole):
    assert kind.of(NUMBERS).value == pytest.approx(whole)
    assert combined([kind.of(part) for part in parts()]).value == pytest.approx(whole)


def test_a_deviation_keeps_its_digits_beside_a_large_mean():
    rng = random.Random(0)
    numbers = [1e9 + rng.gauss(0, 1) for _ in range(400)]
    joined = combined([Deviation.of(numbers[start : start + 40]) for start in range(0, 400, 40)])
    assert joined.value == pytest.approx(statistics.pstdev(numbers), rel=1e-6)


def test_one_value_has_a_deviation_of_zero_and_not_nan():
    assert Deviation.of([4.0]).value == 0.0


@pytest.mark.parametrize("empty", [Mean(0, 0), ExponentialMean(0, 0), Deviation.of([]), Max(), Last()])
def test_a_value_that_saw_nothing_has_no_number(empty):
    assert empty.value is None
    assert combine(empty, empty).value is None


@pytest.mark.parametrize(
    ("empty", "full"),
    [
        (Mean(0, 0), Mean(4, 2)),
        (Deviation.of([]), Deviation.of([1, 3])),
        (Max(), Max(-5)),
        (Last(), Last(0)),
    ],
)
def test_nothing_combined_with_something_is_something(empty, full):
    assert combine(empty, full).value == full.value
    assert combine(full, empty).value == full.value


def test_a_sum_of_nothing_is_zero():
    assert Sum().value == 0
    assert combine(Sum(2), Sum(3)).value == 5


def test_the_last_value_wins():
    assert combine(Last(1.0), Last(0.5)).value == 0.5


def test_a_nan_is_not_lost_among_numbers():
    for first, second in pairwise([1.0, math.nan, 1.0]):
        assert math.isnan(combine(Max(first), Max(second)).value)


def test_values_of_two_kinds_do_not_combine():
    with pytest.raises(TypeError, match="Mean was to be combined with a Sum"):
        combine(Mean(1, 1), Sum(1))


@pytest.mark.parametrize("count", [-1, math.nan, math.inf])
def test_a_count_that_is_no_count_is_refused(count):
    with pytest.raises(ValueError, match="count"):
        Mean(1.0, count)
