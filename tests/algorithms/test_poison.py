"""What is outside the mask changes nothing on the path from log-probs to a loss: no NaN reaches a value or gradient."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from proximo.algorithms.advantages import gae, returns_to_go, shape_rewards
from proximo.algorithms.group_baselines import group_centred, group_standardised, leave_one_out, pass_at_k
from proximo.algorithms.kl import k1, k2, weighted_k3
from proximo.algorithms.losses import (
    clipped_value_loss,
    explained_variance,
    policy_statistics,
    sft_loss,
    value_statistics,
)
from proximo.algorithms.masking import (
    masked_mean,
    masked_variance,
    rescale,
    segment_sum,
    select,
    standardise,
    sum_per_token,
    value_positions,
)
from proximo.algorithms.objectives import cispo, ppo, sapo

N = 24
X, OLD, OTHER = 0.5 * torch.randn(3, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MASK = torch.rand(N, generator=torch.Generator().manual_seed(1)) > 0.3
POISONS = [float("nan"), float("inf"), float("-inf")]


def policy(x: Tensor, old: Tensor, other: Tensor) -> Tensor:
    return ppo(x, old, other, clip_low=0.2, clip_high=0.28).loss


def dual(x: Tensor, old: Tensor, other: Tensor) -> Tensor:
    return ppo(x, old, other, clip_low=0.2, clip_high=0.28, dual_clip=1.5).loss


def weight_clip(x: Tensor, old: Tensor, other: Tensor) -> Tensor:
    return cispo(x, old, other, clip_low=0.2, clip_high=0.28).loss


def soft_gate(x: Tensor, old: Tensor, other: Tensor) -> Tensor:
    return sapo(x, old, other, gate_positive=1.0, gate_negative=1.05).loss


def huber(x: Tensor, old: Tensor, other: Tensor) -> Tensor:
    return clipped_value_loss(x, old, other, clip=0.2, huber_delta=0.3)


def value(x: Tensor, old: Tensor, other: Tensor) -> Tensor:
    return clipped_value_loss(x, old, other, clip=0.2)


def sft(x: Tensor, old: Tensor, other: Tensor) -> Tensor:
    return sft_loss(x)


def kl_k2(x: Tensor, old: Tensor, other: Tensor) -> Tensor:
    return k2(x, other)


LOSSES = [policy, dual, weight_clip, soft_gate, value, huber, sft, kl_k2, weighted_k3]


def loss_and_gradient(
    per_token: Callable, x: Tensor, old: Tensor, other: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    loss = sum_per_token(per_token(*select(mask, x, old, other)), mask, denominator=MASK.sum())
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def poisoned(x: Tensor, poison: float) -> Tensor:
    return torch.where(MASK, x, poison)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("per_token", LOSSES)
def test_poison_outside_the_mask_changes_no_loss_and_no_gradient(per_token, poison):
    clean = loss_and_gradient(per_token, X, OLD, OTHER, MASK)
    found = loss_and_gradient(per_token, *(poisoned(x, poison) for x in (X, OLD, OTHER)), MASK)
    assert found[0].equal(clean[0])
    assert found[1].equal(clean[1])
    assert not found[1][~MASK].any()


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("reduce", [masked_mean, masked_variance, standardise, rescale])
def test_poison_outside_the_mask_changes_no_reduction_and_no_gradient(reduce, poison):
    results = []
    for x in (X, poisoned(X, poison)):
        leaf = x.detach().requires_grad_()
        found = reduce(leaf, MASK)
        results.append((found.detach(), torch.autograd.grad(found.square().sum(), leaf)[0]))
    assert results[0][0].equal(results[1][0])
    assert results[0][1].equal(results[1][1])


@pytest.mark.parametrize("poison", POISONS)
def test_poison_outside_the_mask_changes_no_reward_advantage_or_return(poison):
    lengths = (10, 6, 8)
    mask = MASK.clone()
    mask[10:16] = False  # the second response is left out, with its score
    scores, bootstrap = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), torch.tensor([False, True, False])
    values = torch.randn(N + 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    read = torch.zeros(N + 3, dtype=torch.bool)
    read[value_positions(lengths)] = mask

    def run(logprobs: Tensor, scores: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        rewards = shape_rewards(k1(logprobs, OTHER), scores, mask, lengths, kl_coefficient=0.1)
        outside = torch.where(mask, rewards, logprobs)
        return rewards, *gae(outside, values, mask, lengths, bootstrap=bootstrap, gamma=0.99, lam=0.95)

    bad_scores = torch.tensor([1.0, poison, 3.0], dtype=torch.float64)
    found = run(torch.where(mask, X, poison), bad_scores, torch.where(read, values, poison))
    for bad, clean in zip(found, run(X, scores, values), strict=True):
        assert bad.equal(clean)


@pytest.mark.parametrize("poison", POISONS)
def test_poison_outside_the_mask_changes_no_statistic(poison):
    bad = [poisoned(x, poison) for x in (X, OLD, OTHER)]
    clips = {"clip_low": 0.2, "clip_high": 0.2}
    found = policy_statistics(*bad[:2], ppo(*bad, **clips).clipped, MASK)
    assert found == policy_statistics(X, OLD, ppo(X, OLD, OTHER, **clips).clipped, MASK)
    assert value_statistics(*bad, MASK, clip=0.2) == value_statistics(X, OLD, OTHER, MASK, clip=0.2)
    assert explained_variance(*bad[:2], MASK) == explained_variance(X, OLD, MASK)


def test_nan_inside_the_mask_is_not_hidden():
    bad = X.clone()
    bad[MASK.nonzero()[0]] = float("nan")
    assert loss_and_gradient(policy, bad, OLD, OTHER, MASK)[0].isnan()
    assert masked_mean(bad, MASK).isnan()
    assert policy_statistics(bad, OLD, torch.zeros(N, dtype=torch.bool), MASK).max_abs_log_ratio.isnan()


def of_groups(function: Callable[..., Tensor], **options: float) -> Callable[..., Tensor]:
    return lambda x, values, scores, mask, lengths: function(
        scores, torch.zeros(len(lengths), dtype=torch.long), torch.ones(len(lengths), dtype=torch.bool), **options
    )


def advantages_and_returns(x: Tensor, values: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    return torch.cat(gae(x, values, mask, lengths, bootstrap=torch.ones(len(lengths)) > 0, gamma=1.0, lam=0.95))


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "masked_mean": lambda x, values, scores, mask, lengths: masked_mean(x, mask),
    "masked_variance": lambda x, values, scores, mask, lengths: masked_variance(x, mask),
    "standardise": lambda x, values, scores, mask, lengths: standardise(x, mask),
    "rescale": lambda x, values, scores, mask, lengths: rescale(x, mask),
    "segment_sum": lambda x, values, scores, mask, lengths: segment_sum(x, lengths),
    "shape_rewards": lambda x, values, scores, mask, lengths: shape_rewards(
        x, scores.double(), mask, lengths, kl_coefficient=0.1
    ),
    "gae": lambda x, values, scores, mask, lengths: advantages_and_returns(x, values, mask, lengths),
    "returns_to_go": lambda x, values, scores, mask, lengths: returns_to_go(x, mask, lengths, gamma=0.9),
    "policy loss": lambda x, values, scores, mask, lengths: policy(x, x, x),
    "value loss": lambda x, values, scores, mask, lengths: value(x, x, x),
    "group_centred": of_groups(group_centred),
    "group_standardised": of_groups(group_standardised),
    "leave_one_out": of_groups(leave_one_out),
    "pass_at_k": of_groups(pass_at_k, k=2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_dtype_is_kept_the_arguments_are_left_alone_and_nothing_at_all_is_no_error(name, dtype):
    lengths = (10, 6, 8)
    given = X.to(dtype), torch.ones(N + 3, dtype=dtype), torch.tensor([1.0, 2.0, 0.5], dtype=dtype), MASK
    copies = [each.clone() for each in given]
    assert FUNCTIONS[name](*given, lengths).dtype is dtype
    assert all(map(torch.equal, given, copies))
    for nothing in ((), (0, 0)):
        empty = torch.zeros(0, dtype=dtype), *[torch.zeros(len(nothing), dtype=dtype)] * 2, MASK[:0]
        found = FUNCTIONS[name](*empty, nothing)
        assert found.dtype is dtype
        assert not found.any()
