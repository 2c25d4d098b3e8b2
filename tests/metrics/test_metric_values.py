"""Reductions: what a value is after it met others of its kind."""

import math
import random
import statistics
from itertools import pairwise

import pytest

from proximo.metrics.values import Deviation, ExponentialMean, Last, Max, Mean, Sum

NUMBERS = [3.0, -1.5, 8.25, 0.0, 2.0, 2.0, -7.0]


def parts() -> list[list[float]]:
    return [NUMBERS[:1], NUMBERS[1:5], [], NUMBERS[5:]]


def combined(values):
    result = values[0]
    for value in values[1:]:
        result = result.combine(value)
    return result


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


@pytest.mark.parametrize("empty", [Mean(0, 0), ExponentialMean(0, 0), Deviation.of([]), Max(), Last()])
def test_a_value_that_saw_nothing_has_no_number(empty):
    assert empty.value is None
    assert empty.combine(empty).value is None


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
    assert empty.combine(full).value == full.value
    assert full.combine(empty).value == full.value


def test_values_combine_by_their_own_rule():
    assert Mean(total=10.0, count=1).combine(Mean(total=9.0, count=9)).value == pytest.approx(1.9)
    assert ExponentialMean(math.log(2), 1).combine(ExponentialMean(math.log(32), 1)).value == pytest.approx(8.0)
    assert ExponentialMean(1e6, 1).value == math.inf
    assert Deviation.of([4.0]).value == 0.0
    assert (Sum().value, Sum(2).combine(Sum(3)).value, Last(1.0).combine(Last(0.5)).value) == (0, 5, 0.5)
    for first, second in pairwise([1.0, math.nan, 1.0]):
        assert math.isnan(Max(first).combine(Max(second)).value)


def test_what_cannot_be_counted_is_refused():
    for count in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match="count"):
            Mean(1.0, count)
