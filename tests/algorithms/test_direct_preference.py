"""The loss of DPO, by hand: value, gradient, and where it is lowest."""

import math

import pytest
import torch
from torch import Tensor

from proximo.algorithms.preferences import dpo_loss, implicit_rewards, ipo_loss


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def ratios(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("smoothing", "expected"), [(0.0, 0.658760), (0.1, 0.665760)])
def test_a_published_number(smoothing: float, expected: float) -> None:
    """Beta 0.1, and a difference of log-ratios of 0.7."""
    loss = dpo_loss(ratios(-3.0), ratios(-3.7), beta=0.1, label_smoothing=smoothing)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_value_and_gradient_by_hand(smoothing: float) -> None:
    chosen, rejected = ratios(1.0, -2.0, 0.0), ratios(-0.5, 1.0, 0.0)
    loss = dpo_loss(chosen, rejected, beta=0.5, label_smoothing=smoothing)
    gaps = [0.75, -1.5, 0.0]
    values = [-(1 - smoothing) * math.log(sigmoid(x)) - smoothing * math.log(sigmoid(-x)) for x in gaps]
    assert loss.tolist() == pytest.approx(values, rel=1e-12)
    pushed = torch.autograd.grad(loss.sum(), (chosen, rejected))
    slopes = [0.5 * (smoothing * sigmoid(x) - (1 - smoothing) * sigmoid(-x)) for x in gaps]
    assert pushed[0].tolist() == pytest.approx(slopes, rel=1e-12)
    assert pushed[1].tolist() == pytest.approx([-slope for slope in slopes], rel=1e-12)
    assert implicit_rewards(torch.tensor([2.0, -1.0]), beta=0.1).tolist() == pytest.approx([0.2, -0.1])


def test_smoothing_puts_the_optimum_at_the_log_odds_of_a_right_label_and_without_it_there_is_none() -> None:
    best = math.log(0.9 / 0.1) / 0.5

    def slope(ratio: float, smoothing: float) -> float:
        chosen = ratios(ratio)
        loss = dpo_loss(chosen, ratios(0.0), beta=0.5, label_smoothing=smoothing)
        return torch.autograd.grad(loss.sum(), chosen)[0].item()

    assert slope(best, 0.1) == pytest.approx(0, abs=1e-15)
    assert slope(best - 0.1, 0.1) < 0 < slope(best + 0.1, 0.1)
    assert slope(best + 0.1, 0.0) < 0


@pytest.mark.parametrize("ratio", [-1e6, 1e6])
def test_far_from_the_reference_it_stays_finite(ratio: float) -> None:
    chosen = ratios(ratio)
    loss = dpo_loss(chosen, ratios(0.0), beta=0.1, label_smoothing=0.1)
    assert loss.isfinite().all()
    assert torch.autograd.grad(loss.sum(), chosen)[0].isfinite().all()


def test_ipo_draws_the_difference_of_log_ratios_to_half_of_one_over_beta() -> None:
    """Differences 3, -4 and 2.5, of which beta 0.2 wants 2.5."""
    chosen, rejected = ratios(1.0, -2.0, 2.0), ratios(-2.0, 2.0, -0.5)
    loss = ipo_loss(chosen, rejected, beta=0.2)
    assert loss.tolist() == pytest.approx([0.25, 42.25, 0.0])
    pushed = torch.autograd.grad(loss.sum(), (chosen, rejected))
    assert pushed[0].tolist() == pytest.approx([1.0, -13.0, 0.0])
    assert pushed[1].tolist() == pytest.approx([-1.0, 13.0, 0.0])
