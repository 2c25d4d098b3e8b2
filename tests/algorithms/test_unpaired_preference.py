"""The loss of KTO and its reference point, by hand: values, gradients, and where they end."""

import math

import pytest
import torch
from torch import Tensor

from proximo.algorithms.preferences import kto_loss, reference_point

DESIRABLE = torch.tensor([True, True, False, False])


def ratios(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_values_worked_out_on_paper() -> None:
    """beta 0.1 and z0 = 2: gains are -0.1, 0.3, 0.1 and -0.5.

    1 - sigmoid(-0.1) = 1 / (1 + e^-0.1) = 0.524979; 1 - sigmoid(0.3) = 0.425557. For undesirable answers
    1 - sigmoid(-0.1) = 0.524979 and 1 - sigmoid(0.5) = 0.377541.
    """
    loss = kto_loss(ratios(1.0, 5.0, 3.0, -3.0), DESIRABLE, beta=0.1, reference_point=2.0)
    assert loss.tolist() == pytest.approx([0.524979, 0.425557, 0.524979, 0.377541], abs=1e-6)


def test_numbers_of_trl() -> None:
    """What `KTOTrainer._compute_loss` of TRL 1.16.0 gave for these log-probs: the mean loss, z0, and the gradient."""
    policy, reference = ratios(-5.0, -7.5, -3.25, -9.0), ratios(-6.0, -7.0, -5.5, -8.5)
    point = reference_point(ratios(-10.0, -11.0, -8.0, -12.5) - ratios(-11.5, -10.0, -9.5, -13.0))
    assert point.item() == 0.625
    loss = kto_loss(
        policy - reference,
        torch.tensor([True, False, True, False]),
        beta=0.3,
        reference_point=point.item(),
        desirable_weight=1.5,
        undesirable_weight=0.7,
    ).mean()
    assert loss.item() == pytest.approx(0.46539114929815173, rel=1e-12)
    (slopes,) = torch.autograd.grad(loss, policy)
    wanted = [-0.02803619811789591, 0.012758227797022355, -0.026518006159242366, 0.012758227797022355]
    assert slopes.tolist() == pytest.approx(wanted, rel=1e-12)


def test_the_gradient_is_beta_times_the_slope_of_the_sigmoid_and_of_the_sign_of_the_label() -> None:
    """s (1 - s) with s = sigmoid(gain): 0.5 and 0.5 give 1/4; ln 3 gives 3/4 and 3/16."""
    values = ratios(2.0, 2 + 10 * math.log(3), 2.0, 2 + 10 * math.log(3))
    loss = kto_loss(values, DESIRABLE, beta=0.1, reference_point=2.0, undesirable_weight=2.0)
    (slopes,) = torch.autograd.grad(loss.sum(), values)
    assert slopes.tolist() == pytest.approx([-0.1 / 4, -0.1 * 3 / 16, 0.2 / 4, 0.2 * 3 / 16], rel=1e-12)


@pytest.mark.parametrize("ratio", [-1e6, 1e6])
def test_far_from_the_reference_the_loss_is_0_or_the_weight_and_the_gradient_vanishes(ratio: float) -> None:
    values = ratios(*[ratio] * 4)
    loss = kto_loss(values, DESIRABLE, beta=0.1, reference_point=0.0, desirable_weight=3.0)
    lost = [3.0, 3.0, 0.0, 0.0] if ratio < 0 else [0.0, 0.0, 1.0, 1.0]
    assert loss.tolist() == lost
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == [0.0] * 4


@pytest.mark.parametrize(("values", "expected"), [((1.0, 4.0, -2.0), 1.0), ((1.0, -4.0), 0.0), ((0.0,), 0.0)])
def test_the_reference_point_is_the_mean_but_never_negative(values: tuple[float, ...], expected: float) -> None:
    assert reference_point(ratios(*values)).item() == expected


def test_the_reference_point_has_no_gradient_and_hides_no_nan() -> None:
    assert not reference_point(ratios(1.0, 2.0)).requires_grad
    assert reference_point(ratios(1.0, math.nan)).isnan()
    with pytest.raises(ValueError, match="at least one"):
        reference_point(ratios())
