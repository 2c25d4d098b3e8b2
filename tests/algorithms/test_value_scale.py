"""Moments of returns in batches against those of all returns at once, and units that leave values where they are."""

import random
from statistics import fmean, pvariance

import pytest
import torch

from proximo.algorithms.value_scale import (
    SMALLEST_SCALE,
    ReturnMoments,
    ValueUnits,
    cumulative_moments,
    exponential_moments,
    updated_scale,
)

DRAW = random.Random(0)
BATCHES = [[DRAW.gauss(mean, 2.0) for _ in range(size)] for mean, size in ((0, 3), (5, 1), (-2, 8), (1, 4))]


@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_cumulative_moments_are_those_of_all_returns_at_once(offset):
    found = ReturnMoments()
    for batch in BATCHES:
        shifted = [x + offset for x in batch]
        found = cumulative_moments(found, mean=fmean(shifted), variance=pvariance(batch), count=len(batch))
    everything = [x for batch in BATCHES for x in batch]
    assert found.weight == 16
    assert found.mean == pytest.approx(fmean(everything) + offset, abs=1e-7)
    assert found.variance == pytest.approx(pvariance(everything), rel=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_exponential_moments_are_debiased_averages_of_mean_and_mean_square(decay):
    found, mean, square, weight = ReturnMoments(), 0.0, 0.0, 0.0
    for batch in BATCHES:
        found = exponential_moments(found, mean=fmean(batch), variance=pvariance(batch), decay=decay)
        mean = decay * mean + (1 - decay) * fmean(batch)
        square = decay * square + (1 - decay) * fmean([x * x for x in batch])
        weight = decay * weight + (1 - decay)
        assert found.mean == pytest.approx(mean / weight)
        assert found.variance == pytest.approx(square / weight - (mean / weight) ** 2)


def test_the_scale_is_the_deviation_and_only_the_first_offset_moves():
    moments = ReturnMoments(weight=4.0, mean=7.0, variance=9.0)
    units = ValueUnits(scale=2.0, shift=5.0)
    assert updated_scale(units, moments, is_first=False) == ValueUnits(scale=3.0, shift=5.0)
    assert updated_scale(ValueUnits(), moments, is_first=True) == ValueUnits(scale=3.0, shift=7.0)
    hardly = ReturnMoments(weight=4.0, mean=7.0, variance=1e-12)
    assert updated_scale(ValueUnits(), hardly, is_first=False).scale == SMALLEST_SCALE == 0.1
    assert cumulative_moments(ReturnMoments(), mean=0.0, variance=0.0, count=0) == ReturnMoments()


def test_values_and_outputs_are_inverse():
    units = ValueUnits(scale=3.0, shift=5.0)
    outputs = torch.tensor([-1.0, 0.0, 2.0])
    assert units.to_values(outputs).tolist() == [2, 5, 11]
    assert units.to_outputs(units.to_values(outputs)).equal(outputs)
