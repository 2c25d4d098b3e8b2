"""Importance weights and rejection for off-policy samples.

Shapes: T tokens of R responses laid end to end. The proximal policy is that of the step's start, to which the clip
keeps the update close. The behaviour policy sampled the tokens. Nothing here carries a gradient.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from proximo.algorithms import kl
from proximo.algorithms.kl import bounded_exp
from proximo.algorithms.masking import segment_ids, segment_sum

ESTIMATES = {
    "k1": kl.k1,
    "k2": kl.k2,
    "k3": kl.k3,
    "k3_reverse": lambda sampled_logprobs, proximal_logprobs: kl.k3(proximal_logprobs, sampled_logprobs),
}
"""Estimators of KL(sampler || proximal policy) per token; `k3_reverse`: of KL(proximal policy || sampler)."""


@torch.no_grad()
def behaviour_ratios(
    proximal_logprobs: Float[Tensor, "tokens"],
    sampled_logprobs: Float[Tensor, "tokens"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    *,
    of: Literal["token", "response", "geometric_mean"],
) -> Float[Tensor, "tokens"]:
    """[T] w = exp(proximal - sampled) of each token; or over the masked tokens of its response the product of w, or
    their geometric mean.

    w turns the mean over the sampler's tokens into that of the proximal policy (arXiv:2110.00641). The per-token
    weight ignores the prefix; the product over the response includes it, with a variance that grows with length. The
    variance of the geometric mean, exp(mean of proximal - sampled), does not grow, but it is biased for both (AReaL's
    rejection sampling by sequences; for the clipped ratio GSPO, arXiv:2507.18071). Logarithms are cut to +-20 before
    exp.
    """
    log_ratios = torch.where(mask, proximal_logprobs - sampled_logprobs, 0)
    if of != "token":
        log_ratios = _over_responses(log_ratios, mask, lengths, "sum" if of == "response" else "mean")
    return bounded_exp(log_ratios)


@torch.no_grad()
def bounded_weights(
    ratios: Float[Tensor, "*shape"], *, floor: float, cap: float, masked: bool
) -> Float[Tensor, "*shape"]:
    """The ratios cut to [floor, cap], or with `masked` set to 0 outside: factors of the losses, shape kept.

    A cap trades variance for bias (arXiv:1802.01561). A token of weight 0 has no gradient (arXiv:2505.24298; bounded
    on both sides, IcePop), but the denominator of the loss still counts it.
    """
    if masked:
        return torch.where((ratios >= floor) & (ratios <= cap), ratios, 0)
    return ratios.clamp(floor, cap)


@torch.no_grad()
def near_the_sampler(
    proximal_logprobs: Float[Tensor, "tokens"],
    sampled_logprobs: Float[Tensor, "tokens"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    *,
    estimator: Literal["k1", "k2", "k3", "k3_reverse"],
    over: Literal["token", "mean", "sum", "max"],
    limit: float,
) -> Bool[Tensor, "tokens"]:
    """[T] bool: the masked tokens whose divergence of the sampler from the proximal policy is at most `limit`, in nats.

    The divergence of a token is that of `ESTIMATES` of its two log-probs; k1, which has a sign, counts by its size.
    `over` token judges each by itself; the others judge responses as a whole, by the mean, sum or maximum over their
    masked tokens. The mean of k1 is minus the logarithm of the geometric mean of the ratios: |mean| <= limit keeps
    responses whose geometric mean is within exp(+-limit). False outside the mask, which is not read.
    """
    divergence = ESTIMATES[estimator](sampled_logprobs, proximal_logprobs)
    divergence = torch.where(mask, divergence, 0)
    if over in ("token", "max"):
        divergence = divergence.abs()
    if over != "token":
        divergence = _over_responses(divergence, mask, lengths, over)
    return mask & (divergence.abs() <= limit)


@torch.no_grad()
def within_ratio_bounds(
    proximal_logprobs: Float[Tensor, "tokens"],
    sampled_logprobs: Float[Tensor, "tokens"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    *,
    over: Literal["token", "geometric_mean", "product", "max"],
    lower: float,
    upper: float,
) -> Bool[Tensor, "tokens"]:
    """[T] bool: the masked tokens whose ratio w = exp(proximal - sampled) is from `lower`, 0 for no bound, to `upper`.

    `over` token judges each by itself; the others judge responses as a whole, by the geometric mean, the product or the
    maximum of w over their masked tokens. There are two bounds, so that samples that the sampler found too likely and
    too unlikely can have different limits (the sequence mask of OpenRLHF's `seq-mask-tis`, and AReaL's rejection
    sampling by `ratio`, where `sum` is the product). Logarithms are compared, so nothing overflows. False outside the
    mask, which is not read.
    """
    log_ratios = torch.where(mask, proximal_logprobs - sampled_logprobs, 0)
    if over != "token":
        how = {"geometric_mean": "mean", "product": "sum", "max": "max"}[over]
        log_ratios = _over_responses(log_ratios, mask, lengths, how)
    lowest = math.log(lower) if lower > 0 else -math.inf
    return mask & (log_ratios >= lowest) & (log_ratios <= math.log(upper))


def _over_responses(
    values: Float[Tensor, "tokens"], mask: Bool[Tensor, "tokens"], lengths: Sequence[int], how: str
) -> Float[Tensor, "tokens"]:
    """[T] for each token the mean, sum or max over its response of `values`, which are 0 outside the mask."""
    owners = segment_ids(lengths, device=mask.device)
    if how == "max":
        masked = torch.where(mask, values, -math.inf)
        return masked.new_full((len(lengths),), -math.inf).scatter_reduce(0, owners, masked, "amax")[owners]
    total = segment_sum(values, lengths)
    if how == "mean":
        total = total / segment_sum(mask.to(values.dtype), lengths).clamp(min=1)
    return total[owners]


@torch.no_grad()
def unexplained_difference(
    sampled_logprobs: Float[Tensor, "tokens"],
    proximal_logprobs: Float[Tensor, "tokens"],
    mask: Bool[Tensor, "tokens"],
    movement: Float[Tensor, "tokens"],
) -> float | None:
    """Mean over the masked tokens of |sampled - proximal| - 2 movement, in nats, at least 0; None without a token.

    `movement`: how far the mean log-prob of a token moved from the policy that should have sampled it to the proximal
    policy. It is measured on other tokens, so it counts twice. By the triangle inequality, that policy cannot explain
    the rest. Unlike an estimate of the KL, single tokens do not dominate the mean of absolute values.
    """
    if not mask.any():
        return None
    rest = (sampled_logprobs - proximal_logprobs)[mask].double().abs() - 2 * movement[mask].double()
    return max(0.0, float(rest.mean()))
