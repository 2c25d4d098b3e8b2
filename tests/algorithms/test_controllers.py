"""The KL coefficient from step to step."""

import math
from types import SimpleNamespace

import pytest
import torch

from proximo.algorithms.controllers import AdaptiveKLController, ConstantKLController, adaptive_kl

OPTIONS = {"target": 6.0, "horizon": 1000.0}


@pytest.mark.parametrize(
    ("observed", "sequences", "wanted"),
    [
        (6.6, 100, 0.1 * 1.01),
        (5.4, 100, 0.1 * 0.99),
        (6.0, 100, 0.1),
        # by a fifth of the sequences' share at most
        (1e9, 100, 0.1 * 1.02),
        (math.inf, 100, 0.1 * 1.02),
        (0.0, 100, 0.1 * 0.98),
        (-5.0, 100, 0.1 * 0.98),
        (0.0, 10_000, 0.0),
        (math.nan, 0, 0.1),
    ],
)
def test_it_rises_above_the_target_and_falls_below(observed, sequences, wanted):
    found = adaptive_kl(0.1, observed=observed, num_sequences=sequences, **OPTIONS)
    assert found == pytest.approx(wanted)
    assert ConstantKLController(0.05).update([observed] * 9) == 0.05
    with pytest.raises(ValueError, match="not finite"):
        adaptive_kl(0.1, observed=math.nan, num_sequences=5, **OPTIONS)


def test_two_half_steps_move_it_about_as_far_as_one():
    once = adaptive_kl(0.1, observed=6.6, num_sequences=100, **OPTIONS)
    half = adaptive_kl(0.1, observed=6.6, num_sequences=50, **OPTIONS)
    assert adaptive_kl(half, observed=6.6, num_sequences=50, **OPTIONS) == pytest.approx(once, rel=1e-4)


TORCHRL = {"target": 6.0, "horizon": 10_000.0}


@pytest.mark.parametrize(
    ("queue", "expected"), [([-0.6] * 2, 0.1), ([-0.01] * 4, 0.099992), ([-3.0] * 32, 0.100064)], ids=str
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_adaptive_controller_gives_torchrls_numbers(queue, expected, as_tensor):
    """torchrl's queue holds rewards, -coefficient * KL; the controller here is told the KL."""
    divergences = [-reward / 0.1 for reward in queue]
    made = AdaptiveKLController(0.1, **TORCHRL)
    found = made.update(torch.tensor(divergences) if as_tensor else divergences)
    assert found == pytest.approx(expected, abs=1e-8)
    assert type(found) is float
    assert made.coefficient == found


def test_the_adaptive_controller_goes_on_from_its_own_coefficient():
    made = AdaptiveKLController(0.1, **TORCHRL)
    assert made.update([60.0] * 100) == pytest.approx(0.1 * 1.002)
    assert made.update([0.0, 0.0]) == pytest.approx(0.1 * 1.002 * (1 - 0.2 * 2 / 10_000))


def test_nothing_observed_leaves_a_controller_where_it_is_and_nan_is_an_error():
    made = AdaptiveKLController(0.1, **TORCHRL)
    assert made.update([]) == 0.1
    with pytest.raises(ValueError, match="not finite"):
        made.update([1.0, float("nan")])
    assert made.coefficient == 0.1
    assert AdaptiveKLController(0.0, **TORCHRL).update([30.0]) == 0.0


@pytest.mark.parametrize("make", [ConstantKLController, lambda c, **more: AdaptiveKLController(c, **TORCHRL, **more)])
def test_a_controller_writes_into_the_model_at_once_and_at_every_update(make):
    model = SimpleNamespace(kl_coef=None)
    made = make(0.1, model=model)
    assert model.kl_coef == 0.1
    model.kl_coef = 7.0
    made.update([60.0] * 100)
    assert model.kl_coef == made.coefficient != 7.0
    with pytest.raises(AttributeError, match="attribute kl_coef.*SimpleNamespace has none"):
        make(0.1, model=SimpleNamespace())


@pytest.mark.parametrize("coefficient", [None, -0.1, float("nan"), "0.1"], ids=repr)
def test_a_coefficient_that_is_none_is_refused(coefficient):
    with pytest.raises(ValueError, match="coefficient must be a number of at least 0"):
        ConstantKLController(coefficient)
    with pytest.raises(ValueError, match="coefficient must be a number of at least 0"):
        AdaptiveKLController(coefficient, **TORCHRL)


@pytest.mark.parametrize("wrong", [{"target": 0.0}, {"horizon": 0.0}, {"horizon": float("inf")}], ids=str)
def test_a_target_and_a_horizon_are_above_zero(wrong):
    with pytest.raises(ValueError, match="above 0"):
        AdaptiveKLController(0.1, **(TORCHRL | wrong))
