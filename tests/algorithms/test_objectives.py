"""The losses of policy and critic in every branch, by hand: loss, slope along the log-prob, and what is clipped."""

import math

import pytest
import torch
from torch import Tensor

from proximo.algorithms.losses import clipped_value_loss, sft_loss
from proximo.algorithms.masking import sum_of_response_means
from proximo.algorithms.objectives import (
    TokenLosses,
    cispo,
    gmpo,
    gspo,
    m2po,
    ppo,
    sapo,
    sequence_ratios,
    within_second_moment,
)

OLD = -1.5


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def at_ratio(objective, ratio: float, advantage: float, **options) -> tuple[TokenLosses, float]:
    """The objective of one token, and its slope."""
    logprobs = numbers(OLD + math.log(ratio)).requires_grad_()
    found = objective(logprobs, numbers(OLD), numbers(advantage), **options)
    return found, torch.autograd.grad(found.loss.sum(), logprobs)[0].item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (5.0, -2.0, 6.0, 0.0, True),  # 10 without the second bound
        (2.0, -2.0, 4.0, 4.0, False),  # bad and likelier, but below c
        (0.5, -2.0, 1.6, 0.0, True),  # the first clip, as ever
        (5.0, 2.0, -2.6, 0.0, True),
        (0.5, 2.0, -1.0, -1.0, False),
        (5.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_dual_clip_bounds_the_loss_of_bad_tokens_alone(ratio, advantage, loss, slope, clipped):
    found, found_slope = at_ratio(ppo, ratio, advantage, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    assert (found.loss.item(), found_slope) == pytest.approx((loss, slope))
    assert found.clipped.item() is clipped


def test_a_clip_of_the_log_ratio_is_the_same_in_value_and_gradient():
    """As torchrl writes it: the log-ratio between log(1 - low) and log(1 + high), then exp."""
    generator = torch.Generator().manual_seed(0)
    logprobs, old, advantages = torch.randn(3, 200, generator=generator, dtype=torch.float64)
    logprobs.requires_grad_()
    log_ratio = logprobs - old
    near = log_ratio.clamp(math.log(1 - 0.2), math.log(1 + 0.3))
    in_logs = -torch.minimum(log_ratio.exp() * advantages, near.exp() * advantages)
    found = ppo(logprobs, old, advantages, clip_low=0.2, clip_high=0.3)
    assert 20 < found.clipped.sum() < 180
    torch.testing.assert_close(found.loss, in_logs, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss.sum(), logprobs)[0] for loss in (found.loss, in_logs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("ratio", "low", "weight", "clipped"),
    [
        (1.0, 0.2, 1.0, False),
        (1.5, 0.2, 1.3, True),
        (0.5, 0.2, 0.8, True),
        (0.5, 1.0, 0.5, False),  # no lower bound
        (0.01, 1.0, 0.01, False),
    ],
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_weighs_the_log_prob_and_silences_no_token(ratio, low, weight, clipped, advantage):
    found, slope = at_ratio(cispo, ratio, advantage, clip_low=low, clip_high=0.3)
    assert found.loss.item() == pytest.approx(-weight * advantage * (OLD + math.log(ratio)))
    assert slope == pytest.approx(-weight * advantage)
    assert found.clipped.item() is clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 3.0, -6.0, -3.0),  # 4 / 1 * 1/2, and the slope of PPO
        (1.0, -3.0, 3.0, 3.0),  # 4 / 2 * 1/2, and the slope of PPO
        (2.0, 1.0, -2.9242343, -1.5728955),  # sigmoid(1) = 0.7310586
        (0.5, -1.0, 0.5378828, 0.3932239),  # sigmoid(-1) = 0.2689414
        (30.0, 1.0, -4.0, 0.0),  # the gate is closed
    ],
)
def test_the_gate_of_sapo_closes_gradually(ratio, advantage, loss, slope):
    found, found_slope = at_ratio(sapo, ratio, advantage, gate_positive=1.0, gate_negative=2.0)
    assert (found.loss.item(), found_slope) == pytest.approx((loss, slope), abs=1e-6)
    assert not found.clipped.item()


def test_gspo_gives_a_response_one_ratio_and_its_gradient_to_all_its_tokens():
    """Two responses with mean log-ratios 0.2 and -0.5; the second is clipped at 0.8, and one of its tokens is out."""
    changes, advantages = numbers(0.1, 0.3, -0.2, 9.0, -0.8), numbers(2, 2, -3, -3, -3)
    mask = torch.tensor([True, True, True, False, True])
    logprobs = changes.clone().requires_grad_()
    found = gspo(logprobs, torch.zeros(5), advantages, mask, (2, 3), clip_low=0.2, clip_high=0.3)
    s = math.exp(0.2)
    assert found.loss.tolist() == pytest.approx([-2 * s, -2 * s, 2.4, 2.4, 2.4])
    assert found.clipped.tolist() == [False, False, True, True, True]
    (gradient,) = torch.autograd.grad(found.loss[mask].sum(), logprobs)
    # Two losses -2 s, and s moves by s / 2 with each of its two log-probs.
    assert gradient.tolist() == pytest.approx([-2 * s, -2 * s, 0, 0, 0])


def test_gspo_of_responses_of_one_token_is_ppo():
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    bounds = {"clip_low": 0.2, "clip_high": 0.3}
    found, wanted = gspo(*given, torch.ones(50, dtype=torch.bool), (1,) * 50, **bounds), ppo(*given, **bounds)
    torch.testing.assert_close(found.loss, wanted.loss)
    assert found.clipped.equal(wanted.clipped)


def test_gmpo_clips_each_token_on_the_side_of_its_advantage_and_then_takes_the_geometric_mean():
    """Log-ratios 0.1, 0.6 | -0.2, (9, masked), -0.8, 0.5 | 0.3, clips log 1.3, log 0.7, advantages 2, -3 and 0."""
    changes, advantages = numbers(0.1, 0.6, -0.2, 9.0, -0.8, 0.5, 0.3), numbers(2, 2, -3, -3, -3, -3, 0)
    mask = torch.tensor([True, True, True, False, True, True, True])
    logprobs = changes.clone().requires_grad_()
    found = gmpo(logprobs, torch.zeros(7), advantages, mask, (2, 4, 1), clip_low=0.3, clip_high=0.3)
    first = math.exp((0.1 + math.log(1.3)) / 2)
    second = math.exp((-0.2 + math.log(0.7) + 0.5) / 3)
    assert found.loss.tolist() == pytest.approx([*[-2 * first] * 2, *[3 * second] * 4, 0])
    assert found.clipped[mask].tolist() == [False, True, False, True, False, False]
    (gradient,) = torch.autograd.grad(found.loss[mask].sum(), logprobs)
    # Two losses -2 s of a mean of two, three losses 3 s of a mean of three; what was clipped moves nothing.
    assert gradient.tolist() == pytest.approx([-2 * first, 0, 3 * second, 0, 0, 3 * second, 0])


def test_gmpo_of_responses_of_one_token_is_ppo():
    generator = torch.Generator().manual_seed(3)
    given = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    bounds = {"clip_low": 0.2, "clip_high": 0.3}
    found, wanted = gmpo(*given, torch.ones(50, dtype=torch.bool), (1,) * 50, **bounds), ppo(*given, **bounds)
    torch.testing.assert_close(found.loss, wanted.loss)
    assert found.clipped.equal(wanted.clipped)


def test_the_ratio_of_a_response_is_over_its_counted_tokens_and_one_where_it_has_none():
    mask = torch.tensor([False, False, True, False, True])
    found = sequence_ratios(numbers(5, 5, 0.5, 7, -0.1), torch.zeros(5), mask, (2, 0, 3))
    assert found.tolist() == pytest.approx([1, 1, math.exp(0.2)])


@pytest.mark.parametrize("change", [-1e4, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_every_objective_stays_finite_at_any_distance(change, advantage):
    given = torch.tensor([change]), torch.zeros(1), torch.tensor([advantage])
    mask, clips = torch.ones(1, dtype=torch.bool), {"clip_low": 0.2, "clip_high": 0.3}
    for objective in (
        lambda *x: gspo(*x, mask, (1,), **clips),
        lambda *x: gmpo(*x, mask, (1,), **clips),
        lambda *x: gmpo(*x, mask, (1,), clip_low=1.0, clip_high=0.3),
        lambda *x: cispo(*x, **clips),
        lambda *x: sapo(*x, gate_positive=1.0, gate_negative=1.05),
        lambda *x: ppo(*x, **clips),
        lambda *x: ppo(*x, **clips, dual_clip=3.0),
    ):
        logprobs = given[0].clone().requires_grad_()
        loss = objective(logprobs, *given[1:]).loss
        assert loss.isfinite().all()
        assert torch.autograd.grad(loss.sum(), logprobs)[0].isfinite().all()


def test_in_the_mean_over_responses_each_weighs_the_same():
    per_token, mask = numbers(1, 2, 3, 10, 99, 50), torch.tensor([True, True, True, True, False, False])
    found = sum_of_response_means(per_token, mask, (3, 2, 0, 1), denominator=4)
    assert found.item() == pytest.approx((2 + 10) / 4)


@pytest.mark.parametrize(
    ("error", "loss", "slope"),
    [(0.5, 0.125, 0.5), (-0.5, 0.125, -0.5), (2.0, 2.0, 2.0), (3.0, 4.0, 2.0), (-3.0, 4.0, -2.0), (0.0, 0.0, 0.0)],
)
def test_the_huber_loss_is_linear_beyond_its_delta(error, loss, slope):
    values = numbers(1 + error).requires_grad_()
    found = clipped_value_loss(values, numbers(0), numbers(1), clip=None, huber_delta=2.0)
    assert found.item() == pytest.approx(loss)
    assert torch.autograd.grad(found.sum(), values)[0].item() == pytest.approx(slope)


def test_the_tokens_furthest_from_the_old_policy_are_left_out_until_the_second_moment_is_within_its_limit():
    """Squares 0.01, 0.04, 0.09, 0.16, 0.25: the means of the smallest ones are 0.01, 0.025, 0.0467, 0.075, 0.11."""
    log_ratios = torch.tensor([0.2, -0.5, 0.1, 0.4, -0.3], dtype=torch.float64)
    everything = torch.ones(5, dtype=torch.bool)
    for limit, kept in ((0.2, [0, 1, 2, 3, 4]), (0.08, [0, 2, 3, 4]), (0.04, [0, 2]), (0.02, [2]), (0.001, [])):
        assert within_second_moment(log_ratios, everything, limit=limit).nonzero().flatten().tolist() == kept
    squares = log_ratios.square()
    for limit in torch.linspace(0.001, 0.12, 50).tolist():
        kept = within_second_moment(log_ratios, everything, limit=limit)
        fitting = [n for n in range(1, 6) if squares.sort().values[:n].mean() <= limit]
        assert int(kept.sum()) == max(fitting, default=0)


def test_equal_tokens_are_left_out_together_and_what_is_masked_is_not_looked_at():
    log_ratios = torch.tensor([0.1, 0.5, math.nan, -0.5, 0.5, 0.1], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, True, True])
    found = within_second_moment(log_ratios, mask, limit=0.1)
    assert found.tolist() == [True, False, False, False, False, True]
    assert within_second_moment(log_ratios, mask, limit=1.0).tolist() == mask.tolist()
    nothing = torch.zeros(6, dtype=torch.bool)
    assert within_second_moment(log_ratios, nothing, limit=0.1).tolist() == [False] * 6


def test_m2po_has_no_clip_and_no_gradient_where_a_token_is_left_out():
    logprobs = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    advantages, kept_tokens = torch.tensor([2.0, 1.0, -1.0], dtype=torch.float64), torch.tensor([1.0, 1.0, 0.0])
    found = m2po(logprobs, torch.zeros(3, dtype=torch.float64), advantages, kept_tokens)
    wanted = torch.tensor([-2 * math.e, -1 / math.e, 0.0], dtype=torch.float64)
    torch.testing.assert_close(found.loss.detach(), wanted)
    assert found.clipped.tolist() == [False, False, True]
    found.loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, wanted)


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
