"""The KL coefficient from step to step."""

import pytest

from proximo.algorithms.controllers import adaptive_kl, constant_kl

OPTIONS = {"target": 6.0, "horizon": 1000.0}


def test_constant_stays():
    assert constant_kl(0.05, observed=100.0, num_sequences=64) == 0.05


def test_it_rises_above_the_target_and_falls_below():
    assert adaptive_kl(0.1, observed=6.6, num_sequences=100, **OPTIONS) == pytest.approx(0.1 * 1.01)
    assert adaptive_kl(0.1, observed=5.4, num_sequences=100, **OPTIONS) == pytest.approx(0.1 * 0.99)
    assert adaptive_kl(0.1, observed=6.0, num_sequences=100, **OPTIONS) == 0.1


@pytest.mark.parametrize(("observed", "factor"), [(1e9, 1.02), (float("inf"), 1.02), (0.0, 0.98), (-5.0, 0.98)])
def test_one_step_moves_it_by_a_fifth_of_the_sequences_share_at_most(observed, factor):
    assert adaptive_kl(0.1, observed=observed, num_sequences=100, **OPTIONS) == pytest.approx(0.1 * factor)


def test_two_half_steps_move_it_about_as_far_as_one():
    once = adaptive_kl(0.1, observed=6.6, num_sequences=100, **OPTIONS)
    half = adaptive_kl(0.1, observed=6.6, num_sequences=50, **OPTIONS)
    assert adaptive_kl(half, observed=6.6, num_sequences=50, **OPTIONS) == pytest.approx(once, rel=1e-4)


def test_nothing_observed_changes_nothing():
    assert adaptive_kl(0.1, observed=float("nan"), num_sequences=0, **OPTIONS) == 0.1


def test_it_never_falls_below_zero():
    assert adaptive_kl(0.1, observed=0.0, num_sequences=10_000, **OPTIONS) == 0


def test_a_kl_that_is_not_a_number_is_an_error_and_not_a_coefficient():
    with pytest.raises(ValueError, match="not finite"):
        adaptive_kl(0.1, observed=float("nan"), num_sequences=5, **OPTIONS)
