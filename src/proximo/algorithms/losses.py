"""Losses per token, and what is counted about them. Not scalars: `masking.sum_per_token` makes those.

Shapes: all tensors of one call are [T]. Losses work token by token and take no mask: where some entries are unusable,
pass the tensors through `masking.select` first. Statistics are sums and counts over a mask, so that those of
micro-batches add up with `+` to those of the whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from proximo.algorithms import objectives
from proximo.algorithms.kl import bounded_exp, k2, k3
from proximo.algorithms.masking import masked_variance


def clipped_policy_loss(
    logprobs: Float[Tensor, "tokens"],
    old_logprobs: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "tokens"]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = policy / old policy (arXiv:1707.06347, eq. 7).

    The loss of `objectives.ppo`, which says more of it and of what may take its place.
    """
    return objectives.ppo(logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high).loss


def clipped_value_loss(
    values: Float[Tensor, "tokens"],
    old_values: Float[Tensor, "tokens"],
    returns: Float[Tensor, "tokens"],
    *,
    clip: float | None,
    huber_delta: float | None = None,
) -> Float[Tensor, "tokens"]:
    """max(l(V - R), l(clip(V, V_old - clip, V_old + clip) - R)); plain l(V - R) where `clip` is None.

    l(x) = x^2 / 2, and with d = `huber_delta` d (|x| - d / 2) where |x| is above d: an outlier pulls no harder than d.
    d = 1 is the smooth L1 loss of torch and torchrl.

    Source: the value loss of openai/baselines, as in openai/lm-human-preferences.
    """
    plain = _error_loss(values - returns, huber_delta)
    if clip is None:
        return plain
    near = values.clamp(old_values - clip, old_values + clip)
    return torch.maximum(plain, _error_loss(near - returns, huber_delta))


def sft_loss(logprobs: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """Negative log-likelihood of each token, in nats."""
    return -logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyStatistics:
    """Sums over the valid tokens of one or more micro-batches; divide by `num_tokens` for means. Scalars."""

    num_tokens: Shaped[Tensor, ""]
    clipped: Shaped[Tensor, ""]
    """Tokens on whose loss a bound acted (`objectives.TokenLosses.clipped`)."""
    ratio: Shaped[Tensor, ""]
    ratio_squared: Shaped[Tensor, ""]
    k1: Shaped[Tensor, ""]
    """Old - new log-probs. Like k2 and k3 it estimates KL(old policy || policy): the old one wrote the tokens."""
    k2: Shaped[Tensor, ""]
    k3: Shaped[Tensor, ""]
    abs_log_ratio: Shaped[Tensor, ""]
    max_abs_log_ratio: Shaped[Tensor, ""]
    """Not a sum: the largest seen; 0 over no tokens."""
    others: Mapping[str, Shaped[Tensor, ""]] = field(default_factory=dict)
    """Name -> sum of what only some losses measure."""

    def __add__(self, other: "PolicyStatistics") -> "PolicyStatistics":
        return PolicyStatistics(
            num_tokens=self.num_tokens + other.num_tokens,
            clipped=self.clipped + other.clipped,
            ratio=self.ratio + other.ratio,
            ratio_squared=self.ratio_squared + other.ratio_squared,
            k1=self.k1 + other.k1,
            k2=self.k2 + other.k2,
            k3=self.k3 + other.k3,
            abs_log_ratio=self.abs_log_ratio + other.abs_log_ratio,
            max_abs_log_ratio=torch.maximum(self.max_abs_log_ratio, other.max_abs_log_ratio),
            others={name: value + other.others[name] for name, value in self.others.items()},
        )


@torch.no_grad()
def policy_statistics(
    logprobs: Float[Tensor, "tokens"],
    old_logprobs: Float[Tensor, "tokens"],
    clipped: Bool[Tensor, "tokens"],
    mask: Bool[Tensor, "tokens"],
) -> PolicyStatistics:
    """How far the tokens of the mask ([T] bool) moved, and how many were `clipped` ([T] bool, from the objective)."""
    logprobs, old_logprobs = logprobs[mask], old_logprobs[mask]
    ratio = bounded_exp(logprobs - old_logprobs)
    return PolicyStatistics(
        num_tokens=mask.sum(),
        clipped=clipped[mask].sum(),
        ratio=ratio.sum(),
        ratio_squared=ratio.square().sum(),
        k1=(old_logprobs - logprobs).sum(),
        k2=k2(old_logprobs, logprobs).sum(),
        k3=k3(old_logprobs, logprobs).sum(),
        abs_log_ratio=(logprobs - old_logprobs).abs().sum(),
        max_abs_log_ratio=torch.cat([logprobs.new_zeros(1), (logprobs - old_logprobs).abs()]).amax(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueStatistics:
    """Sums over the valid tokens of one or more micro-batches; divide by `num_tokens` for means. Scalars."""

    num_tokens: Shaped[Tensor, ""]
    clipped: Shaped[Tensor, ""]
    """Tokens whose clipped branch is the larger loss."""
    squared_error: Shaped[Tensor, ""]
    """(V - R)^2, without the factor 1/2 of the loss and without clipping."""
    values: Shaped[Tensor, ""]
    returns: Shaped[Tensor, ""]

    def __add__(self, other: "ValueStatistics") -> "ValueStatistics":
        return ValueStatistics(
            num_tokens=self.num_tokens + other.num_tokens,
            clipped=self.clipped + other.clipped,
            squared_error=self.squared_error + other.squared_error,
            values=self.values + other.values,
            returns=self.returns + other.returns,
        )


@torch.no_grad()
def value_statistics(
    values: Float[Tensor, "tokens"],
    old_values: Float[Tensor, "tokens"],
    returns: Float[Tensor, "tokens"],
    mask: Bool[Tensor, "tokens"],
    *,
    clip: float | None,
) -> ValueStatistics:
    """What `clipped_value_loss` did on the tokens of the mask ([T] bool).

    The squares stand for every loss that grows with the distance from the return: the larger branch is the same.
    """
    values, old_values, returns = values[mask], old_values[mask], returns[mask]
    plain = clipped_value_loss(values, old_values, returns, clip=None)
    return ValueStatistics(
        num_tokens=mask.sum(),
        clipped=(clipped_value_loss(values, old_values, returns, clip=clip) > plain).sum(),
        squared_error=(values - returns).square().sum(),
        values=values.sum(),
        returns=returns.sum(),
    )


@torch.no_grad()
def explained_variance(
    values: Float[Tensor, "tokens"], returns: Float[Tensor, "tokens"], mask: Bool[Tensor, "tokens"]
) -> Float[Tensor, ""]:
    """1 - variance(returns - values) / variance(returns) over the mask, a scalar.

    1 is perfect, 0 no better than a constant, below 0 worse. Where the returns do not vary it is defined as 0. A
    constant offset of the values does not show here: it does in `ValueStatistics.squared_error`.
    """
    spread = masked_variance(returns, mask)
    unexplained = masked_variance(returns - values, mask)
    return torch.where(spread > 0, 1 - unexplained / spread, 0)


def _error_loss(error: Tensor, huber_delta: float | None) -> Tensor:
    squared = 0.5 * error.square()
    if huber_delta is None:
        return squared
    distance = error.abs()
    return torch.where(distance <= huber_delta, squared, huber_delta * (distance - 0.5 * huber_delta))
