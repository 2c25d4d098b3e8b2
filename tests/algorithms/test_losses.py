"""Losses per token: each branch of the clips by hand, and what the gradient does in it."""

import math

import pytest
import torch

from proximo.algorithms.losses import clipped_value_loss, sft_loss
from proximo.algorithms.objectives import ppo

CLIPS = {"clip_low": 0.2, "clip_high": 0.3}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.6, 0.0),  # already likelier than the clip allows: nothing more to gain
        (0.5, 2.0, -1.0, -1.0),  # less likely, though good: the way back stays open
        (0.5, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 3.0),
        (0.9, -2.0, 1.8, 1.8),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_policy_loss_and_its_slope_in_every_branch(ratio, advantage, loss, slope):
    """The slope is along the log-prob: -ratio * advantage where the clip is not active."""
    old_logprobs = torch.tensor([-1.5], dtype=torch.float64)
    logprobs = (old_logprobs + math.log(ratio)).requires_grad_()
    found = ppo(logprobs, old_logprobs, torch.tensor([advantage], dtype=torch.float64), **CLIPS).loss
    assert found.item() == pytest.approx(loss)
    assert torch.autograd.grad(found.sum(), logprobs)[0].item() == pytest.approx(slope)


@pytest.mark.parametrize(
    ("value", "target", "loss", "slope"),
    [
        (0.1, 1.0, 0.405, -0.9),
        (0.5, 1.0, 0.32, 0.0),  # moved 0.5 towards the target, 0.2 counts
        (0.5, -1.0, 1.125, 1.5),  # moved away: the full error counts
        (-0.5, 1.0, 1.125, -1.5),
        (0.0, 1.0, 0.5, -1.0),
    ],
)
def test_value_loss_and_its_slope_in_every_branch(value, target, loss, slope):
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old_values, returns = torch.zeros(1, dtype=torch.float64), torch.tensor([target], dtype=torch.float64)
    found = clipped_value_loss(values, old_values, returns, clip=0.2)
    assert found.item() == pytest.approx(loss)
    assert torch.autograd.grad(found.sum(), values)[0].item() == pytest.approx(slope)


def test_sft_loss_is_the_negative_log_likelihood():
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 3, 6, 3])
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    wanted = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(sft_loss(logprobs), wanted)
