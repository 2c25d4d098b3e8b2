"""Losses and aggregates of steps, against numbers worked by hand."""

import math

import pytest
import torch

from proximo.algorithms.process_rewards import running_aggregate, step_deltas, step_loss

EXACT = {"rtol": 0, "atol": 1e-12}


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_the_loss_of_a_step_is_the_cross_entropy_of_its_label() -> None:
    """sigmoid(ln 3) = 3/4: -ln 3/4 if right, -ln 1/4 if wrong, and half of each where the label is 1/2."""
    found = step_loss(tensor(math.log(3), math.log(3), math.log(3), 0.0), tensor(1, 0, 0.5, 1))
    right, wrong = -math.log(3 / 4), -math.log(1 / 4)
    torch.testing.assert_close(found, tensor(right, wrong, (right + wrong) / 2, math.log(2)), **EXACT)


def test_the_gradient_of_the_loss_is_probability_minus_label() -> None:
    scores = tensor(math.log(3), -math.log(3), 40.0).requires_grad_()
    step_loss(scores, tensor(1, 0.5, 0)).sum().backward()
    torch.testing.assert_close(scores.grad, tensor(3 / 4 - 1, 1 / 4 - 1 / 2, 1), **EXACT)


@pytest.mark.parametrize(
    ("how", "running", "deltas"),
    [
        ("min", (0.8, 0.5, 0.5), (0.8, -0.3, 0.0)),
        ("product", (0.8, 0.4, 0.36), (0.8, -0.4, -0.04)),
        ("last", (0.8, 0.5, 0.9), (0.8, -0.3, 0.4)),
        ("mean", (0.8, 0.65, 2.2 / 3), (0.8, -0.15, 2.2 / 3 - 0.65)),
    ],
)
def test_aggregates_of_the_first_steps_and_what_each_step_adds(how, running, deltas) -> None:
    """Of steps with the probabilities 0.8, 0.5, 0.9."""
    found = running_aggregate(tensor(0.8, 0.5, 0.9), how)
    torch.testing.assert_close(found, tensor(*running), **EXACT)
    torch.testing.assert_close(step_deltas(found), tensor(*deltas), **EXACT)


def test_a_further_right_step_pays_nothing_by_its_minimum_and_more_in_a_plain_sum() -> None:
    once, twice = tensor(0.9, 0.9), tensor(0.9, 0.9, 0.9, 0.9)
    assert step_deltas(running_aggregate(once, "min")).sum() == step_deltas(running_aggregate(twice, "min")).sum()
    assert twice.sum() == 2 * once.sum()
