"""Losses per token and their statistics, and the loss that balances experts. `masking.sum_per_token` makes scalars.

Shapes: all tensors of one call are [T]. Losses work token by token and take no mask: where some entries are unusable,
pass the tensors through `masking.select` first. Statistics are sums and counts over a mask, so that those of
micro-batches add up with `+` to those of the whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from proximo.algorithms.kl import bounded_exp, k3
from proximo.algorithms.masking import masked_variance


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
    """Tokens with a loss that a bound changed (`objectives.TokenLosses.clipped`)."""
    ratio: Shaped[Tensor, ""]
    ratio_squared: Shaped[Tensor, ""]
    k3: Shaped[Tensor, ""]
    """An estimate of KL(old policy || policy): the old one wrote the tokens."""
    abs_log_ratio: Shaped[Tensor, ""]
    max_abs_log_ratio: Shaped[Tensor, ""]
    """The maximum, not a sum; 0 over no tokens."""
    others: Mapping[str, Shaped[Tensor, ""]] = field(default_factory=dict)
    """Name -> sum of a quantity that only some losses measure."""

    def __add__(self, other: "PolicyStatistics") -> "PolicyStatistics":
        return PolicyStatistics(
            num_tokens=self.num_tokens + other.num_tokens,
            clipped=self.clipped + other.clipped,
            ratio=self.ratio + other.ratio,
            ratio_squared=self.ratio_squared + other.ratio_squared,
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
        k3=k3(old_logprobs, logprobs).sum(),
        abs_log_ratio=(logprobs - old_logprobs).abs().sum(),
        max_abs_log_ratio=torch.cat([logprobs.new_zeros(1), (logprobs - old_logprobs).abs()]).amax(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueStatistics:
    """Sums over the valid tokens of one or more micro-batches; divide by `num_tokens` for means. Scalars."""

    num_tokens: Shaped[Tensor, ""]
    clipped: Shaped[Tensor, ""]
    """Tokens with the larger loss in the clipped branch."""

    def __add__(self, other: "ValueStatistics") -> "ValueStatistics":
        return ValueStatistics(num_tokens=self.num_tokens + other.num_tokens, clipped=self.clipped + other.clipped)


@torch.no_grad()
def value_statistics(
    values: Float[Tensor, "tokens"],
    old_values: Float[Tensor, "tokens"],
    returns: Float[Tensor, "tokens"],
    mask: Bool[Tensor, "tokens"],
    *,
    clip: float | None,
) -> ValueStatistics:
    """Statistics of `clipped_value_loss` on the tokens of the mask ([T] bool).

    Squares decide which branch is larger; every loss that grows with the distance from the return agrees.
    """
    values, old_values, returns = values[mask], old_values[mask], returns[mask]
    plain = clipped_value_loss(values, old_values, returns, clip=None)
    return ValueStatistics(
        num_tokens=mask.sum(),
        clipped=(clipped_value_loss(values, old_values, returns, clip=clip) > plain).sum(),
    )


@torch.no_grad()
def explained_variance(
    values: Float[Tensor, "tokens"], returns: Float[Tensor, "tokens"], mask: Bool[Tensor, "tokens"]
) -> Float[Tensor, ""]:
    """1 - variance(returns - values) / variance(returns) over the mask, a scalar.

    1 is perfect, 0 no better than a constant, below 0 worse. Where the returns do not vary it is defined as 0. A
    constant offset of the values does not change it.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLoad:
    """The choices of the routers of all layers for some tokens. Loads of several passes add up."""

    counts: Int64[Tensor, "experts"]
    """[E] how often each expert was among the k of a token. Without gradient."""
    probabilities: Float[Tensor, "experts"]
    """[E] sum over the tokens of each expert's probability, in at least float32."""
    num_decisions: Int64[Tensor, ""]
    """Tokens, times layers with a router."""

    def __add__(self, other: "ExpertLoad") -> "ExpertLoad":
        return ExpertLoad(
            counts=self.counts + other.counts,
            probabilities=self.probabilities + other.probabilities,
            num_decisions=self.num_decisions + other.num_decisions,
        )


def expert_load(
    router_logits: Sequence[Float[Tensor, "tokens experts"]],
    token_counts: Int64[Tensor, "tokens"],
    *,
    experts_per_token: int,
) -> ExpertLoad:
    """The load of one pass over packed tokens. `router_logits`: of each layer with a router, [tokens, E].

    `token_counts`: the number of sequences that each token is part of, 0 for a filler token.
    """
    counts, sums = torch.zeros(router_logits[0].shape[-1], dtype=torch.int64, device=token_counts.device), []
    for logits in router_logits:
        probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)
        chosen = probabilities.detach().topk(experts_per_token, dim=-1).indices
        counts.index_add_(0, chosen.flatten(), token_counts.repeat_interleave(experts_per_token))
        sums.append(token_counts.to(probabilities.dtype) @ probabilities)
    return ExpertLoad(
        counts=counts,
        probabilities=torch.stack(sums).sum(dim=0),
        num_decisions=token_counts.sum() * len(router_logits),
    )


def balancing_loss(
    probabilities: Float[Tensor, "experts"], counts: Int64[Tensor, "experts"], *, num_decisions: Int64[Tensor, ""]
) -> Float[Tensor, ""]:
    """The part of some tokens in the load-balancing loss of an update, E sum_e f_e P_e (arXiv:2101.03961, eqs.
    4 to 6; `load_balancing_loss_func` of transformers), for E experts of which a router sends each token to k.

    f_e is the fraction of tokens for which expert e is among the k most probable ones, and P_e its mean probability.
    The loss is k if all experts get equal shares. f has no gradient, so once it is known the loss is a sum over tokens.
    f is that of the whole update (arXiv:2501.11873), so that no gradient depends on micro-batches or ranks.

    `probabilities`: [E] of these tokens, as in `ExpertLoad`. `counts` and `num_decisions`: of the whole update.
    """
    shares = counts.to(probabilities.dtype) / num_decisions
    return len(counts) * (shares * probabilities).sum() / num_decisions
