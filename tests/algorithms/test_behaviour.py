"""Weights and rejection of what another policy sampled, by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from proximo.algorithms.behaviour import behaviour_ratios, bounded_weights, near_the_sampler, within_ratio_bounds
from proximo.algorithms.objectives import ppo

LENGTHS = (3, 2, 0, 1)
MASK = torch.tensor([True, True, False, True, True, True])
CHANGES = (0.5, -0.2, math.nan, -1.0, 0.4, 0.1)
"""Log of policy / sampler at each token."""


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_ratio_is_that_of_a_token_or_the_product_or_geometric_mean_over_its_response():
    proximal = numbers(*CHANGES).requires_grad_()
    each = behaviour_ratios(proximal, torch.zeros(6), MASK, LENGTHS, of="token")
    assert each[MASK].tolist() == pytest.approx([math.exp(x) for x in (0.5, -0.2, -1.0, 0.4, 0.1)])
    whole = behaviour_ratios(proximal, torch.zeros(6), MASK, LENGTHS, of="response")
    assert whole[MASK].tolist() == pytest.approx([math.exp(x) for x in (0.3, 0.3, -0.6, -0.6, 0.1)])
    middle = behaviour_ratios(proximal, torch.zeros(6), MASK, LENGTHS, of="geometric_mean")
    assert middle[MASK].tolist() == pytest.approx([math.exp(x) for x in (0.15, 0.15, -0.3, -0.3, 0.1)])
    assert not each.requires_grad
    assert not whole.requires_grad
    assert not middle.requires_grad


def test_weights_beyond_either_bound_are_cut_to_it_or_dropped():
    ratios = numbers(0.3, 0.5, 1.0, 2.0, 2.5)
    assert bounded_weights(ratios, floor=0.5, cap=2, masked=False).tolist() == [0.5, 0.5, 1, 2, 2]
    assert bounded_weights(ratios, floor=0.5, cap=2, masked=True).tolist() == [0, 0.5, 1, 2, 0]
    assert bounded_weights(ratios, floor=0, cap=2, masked=True).tolist() == [0.3, 0.5, 1, 2, 0]


@pytest.mark.parametrize(
    ("estimator", "over", "limit", "kept"),
    [
        ("k1", "token", 0.45, [1, 4, 5]),  # |log-ratio| of 0.5, 0.2, 1.0, 0.4, 0.1
        ("k1", "mean", 0.2, [0, 1, 5]),  # 0.15, -0.3, 0.1
        ("k1", "sum", 0.35, [0, 1, 5]),  # 0.3, -0.6, 0.1
        ("k2", "mean", 0.1, [0, 1, 5]),  # 0.0725, 0.29, 0.005
        ("k3", "max", 0.15, [0, 1, 5]),
        ("k3_reverse", "token", 0.12, [0, 1, 4, 5]),  # 0.107, 0.021, 0.718, 0.070, 0.005
        ("k3_reverse", "mean", 0.2, [0, 1, 5]),  # 0.064, 0.394, 0.005
    ],
)
def test_what_is_further_than_the_limit_is_left_out_alone_or_with_its_response(estimator, over, limit, kept):
    found = near_the_sampler(
        numbers(*CHANGES), torch.zeros(6), MASK, LENGTHS, estimator=estimator, over=over, limit=limit
    )
    assert found.nonzero().flatten().tolist() == kept


@pytest.mark.parametrize(
    ("over", "lower", "upper", "kept"),
    [
        ("token", 0, 1.5, [1, 3, 4, 5]),  # 1.649, 0.819, 0.368, 1.492, 1.105
        ("geometric_mean", 0, 1.15, [3, 4, 5]),  # 1.162, 0.741, 1.105
        ("geometric_mean", 0.8, 1.15, [5]),
        ("product", 0.5, 1.2, [3, 4, 5]),  # 1.350, 0.549, 1.105
        ("max", 0, 1.5, [3, 4, 5]),  # 1.649, 1.492, 1.105
        ("max", 1.2, 2, [0, 1, 3, 4]),
    ],
)
def test_bounds_on_the_ratio_are_apart_below_and_above(over, lower, upper, kept):
    found = within_ratio_bounds(numbers(*CHANGES), torch.zeros(6), MASK, LENGTHS, over=over, lower=lower, upper=upper)
    assert found.nonzero().flatten().tolist() == kept


def test_a_symmetric_limit_is_the_bounds_on_the_geometric_mean_that_are_inverse_to_each_other():
    given = numbers(*CHANGES), torch.zeros(6), MASK, LENGTHS
    for limit in (0.05, 0.12, 0.2, 0.4):
        both = near_the_sampler(*given, estimator="k1", over="mean", limit=limit)
        bounds = {"lower": math.exp(-limit), "upper": math.exp(limit)}
        assert both.equal(within_ratio_bounds(*given, over="geometric_mean", **bounds)), limit


def test_a_ratio_too_large_for_a_float_is_out_of_bounds():
    changes, mask = numbers(800, -800), torch.tensor([True, True])
    for over, lengths, kept in (("token", (1, 1), [False, True]), ("product", (2,), [True, True])):
        found = within_ratio_bounds(changes, torch.zeros(2), mask, lengths, over=over, lower=0, upper=1e300)
        assert found.tolist() == kept


def test_weights_of_responses_make_the_mean_that_of_the_policy_and_those_of_tokens_leave_out_what_follows():
    """All responses of two tokens out of two, their means as exact sums. The policy writes 0 with probability 1/2 and
    after a 0 always a 0; the sampler slips there half of the time. 00 scores 1, 01 scores 0, and 1. scores 3/4."""
    policy = {(0, 0): 0.5, (0, 1): 0.0, (1, 0): 0.25, (1, 1): 0.25}
    sampler = {(0, 0): 0.25, (0, 1): 0.25, (1, 0): 0.25, (1, 1): 0.25}
    scores, sampled = numbers(1, 0, 0.75, 0.75), numbers(*sampler.values())
    first, second = numbers(0.5, 0.5, 0.5, 0.5), numbers(1, 1e-9, 0.5, 0.5)  # of each response's tokens
    proximal = torch.stack([first, second], dim=1).flatten().log()
    drawn, every = torch.full((8,), math.log(0.5), dtype=torch.float64), torch.ones(8, dtype=torch.bool)
    whole, each = (behaviour_ratios(proximal, drawn, every, (2,) * 4, of=of).view(4, 2) for of in ("response", "token"))
    assert whole[:, 0].tolist() == pytest.approx([2, 0, 1, 1], abs=1e-8)
    assert (sampled * whole[:, 0] * scores).sum().item() == pytest.approx(
        sum(p * score for p, score in zip(policy.values(), scores.tolist(), strict=True)), abs=1e-8
    )
    of_first = [(sampled * weights[:, 0] * scores).view(2, 2).sum(1).tolist() for weights in (whole, each)]
    assert of_first[0] == pytest.approx([0.5, 0.375], abs=1e-8), "the first token 0 is better than 1"
    assert of_first[1] == pytest.approx([0.25, 0.375], abs=1e-8), "and blamed for what the sampler does after it"


LIKELY, PREFERENCE = 0.2, math.log(4)
"""The policy's probability of the disliked token, and by how much its logit is too high in the sampler: there 0.5."""


def drift(
    advantages: tuple[float, float], *, z: float = math.log(LIKELY / (1 - LIKELY)), **bounds: float | bool
) -> float:
    """The mean over the sampler's draws of the gradient that raises the logit z of the disliked token, of two tokens
    with these advantages, the disliked one first. Without bounds the draws are not weighted."""
    logit = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    logprobs = torch.stack([logit, torch.zeros_like(logit)]).log_softmax(0)
    sampled = (logprobs.detach() + numbers(PREFERENCE, 0)).log_softmax(0)
    loss = ppo(logprobs, logprobs.detach(), numbers(*advantages), clip_low=0.2, clip_high=0.2).loss
    if bounds:
        every = torch.tensor([True, True])
        ratios = behaviour_ratios(logprobs, sampled, every, (1, 1), of="token")
        loss = loss * bounded_weights(ratios, **bounds)
    (-sampled.exp() * loss).sum().backward()
    return logit.grad.item()


NONE: dict[str, Any] = {}
WIDE: dict[str, Any] = {"floor": 0, "cap": 2, "masked": False}
TIGHT = WIDE | {"cap": 1.25}
MASKED: dict[str, Any] = {"floor": 0.5, "cap": 2, "masked": True}
GOOD, BAD = (0.4, 0.5), (-0.6, -0.5)
"""Advantages on a prompt whose responses are better, or worse, than the mean of the step, where the token costs 0.1."""


@pytest.mark.parametrize(
    ("bounds", "advantages", "gradient"),
    [
        # 0.5 x 0.4 x 0.8 - 0.5 x 0.5 x 0.2: towards the token that costs
        (NONE, GOOD, 0.11),
        (NONE, BAD, -0.19),
        # the weights are 0.4 and 1.6; on the policy's own draws both are -0.1 x 0.2 x 0.8
        (WIDE, GOOD, -0.016),
        (WIDE, BAD, -0.016),
        # a cap that the usual weight of 1.6 exceeds
        (TIGHT, GOOD, 0.0015),
        # a mask that always leaves out the weight of 0.4: -0.5 x 1.6 x 0.5 x 0.2, and up where others are bad
        (MASKED, GOOD, -0.08),
        (MASKED, BAD, 0.08),
        # without weights a baseline of the state is enough: both advantages less their mean over the draws
        (NONE, (-0.05, 0.05), -0.025),
        # the cost from which the token falls without weights too: (1 - exp(-ln 4)) x 0.5
        (NONE, (0.5 - 0.375, 0.5), 0.0),
    ],
)
def test_the_drift_towards_what_the_sampler_prefers(bounds, advantages, gradient):
    assert drift(advantages, **bounds) == pytest.approx(gradient, abs=1e-9)


def test_the_policy_ends_with_the_token_that_costs_unless_draws_are_weighted():
    """Ascent on the expected gradient. Without weights the token wins for every cost below 0.375 (the case above)."""

    def end(cost: float, **bounds: Any) -> float:
        z = math.log(LIKELY / (1 - LIKELY))
        for _ in range(300):
            z += 2 * drift((0.5 - cost, 0.5), z=z, **bounds)
        return 1 / (1 + math.exp(-z))

    assert end(0.3) > 0.9
    assert end(0.45) < 0.1
    assert end(0.3, **WIDE | {"cap": 4}) < 0.01
