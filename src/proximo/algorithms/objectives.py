"""What the policy minimises on each token: the clip of PPO and what others put in its place. Not the mean over tokens.

Shapes: all tensors of one call are [T], R responses laid end to end where `lengths` are asked for. r_t is policy / old
policy at a token, its logarithm cut to +-20 before exp. Where some entries are unusable, pass the tensors through
`masking.select` first: only what looks at whole responses takes a mask.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from proximo.algorithms.kl import bounded_exp
from proximo.algorithms.masking import broadcast_to_tokens, running_sums, segment_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLosses:
    """The loss of each token, and where a bound acted on it."""

    loss: Float[Tensor, "tokens"]
    clipped: Bool[Tensor, "tokens"]
    """The loss is not what it would be without a bound. But for `cispo` the token has no gradient there."""


def ppo(
    logprobs: Float[Tensor, "tokens"],
    old_logprobs: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLosses:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (arXiv:1707.06347, eq. 7), at most -c A where A < 0.

    Two clips as in DAPO (arXiv:2503.14476); PPO has them equal. c = `dual_clip` (arXiv:1912.09729) bounds the one loss
    that the clip leaves open, that of a bad token which became much likelier: beyond r = c it has no gradient.

    Clipping log r between log(1 - clip_low) and log(1 + clip_high) instead, as torchrl does, is the same in value and
    in gradient, since exp preserves order; so there is no option for it.
    """
    ratio = bounded_exp(logprobs - old_logprobs)
    return _clipped(ratio, advantages, clip_low, clip_high, dual_clip)


def gspo(
    logprobs: Float[Tensor, "tokens"],
    old_logprobs: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLosses:
    """PPO's clip with one ratio for a whole response, s = exp(mean over its masked tokens of log r) (arXiv:2507.18071).

    The gradient runs through s, and so to all tokens of the response alike. With one advantage per response each token
    has the loss of its response, and the mean over tokens and then over responses is the paper's objective. Advantages
    that differ from token to token keep no credit of their own: what acts is their sum over those not clipped.
    """
    ratio = broadcast_to_tokens(sequence_ratios(logprobs, old_logprobs, mask, lengths), lengths)
    return _clipped(ratio, advantages, clip_low, clip_high, None)


def gmpo(
    logprobs: Float[Tensor, "tokens"],
    old_logprobs: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLosses:
    """-s A with s the geometric mean of a response's ratios, each clipped by itself first (GMPO, arXiv:2507.20673).

    log s = mean over its masked tokens of min(log r, log(1 + clip_high)) where A > 0, and of max(log r, log(1 -
    clip_low)) where A < 0: the side on which PPO's clip acts. A token beyond it has no part in the gradient, and the
    others keep theirs, where `gspo` silences all of a response or none. As there, one advantage per response is meant.
    """
    log_ratios = logprobs - old_logprobs
    lowest = math.log(1 - clip_low) if clip_low < 1 else -math.inf
    capped = torch.where(advantages > 0, log_ratios.clamp(max=math.log1p(clip_high)), log_ratios.clamp(min=lowest))
    capped = torch.where(advantages == 0, log_ratios, capped)
    ratio = broadcast_to_tokens(_geometric_means(capped, mask, lengths), lengths)
    return TokenLosses(loss=-ratio * advantages, clipped=capped != log_ratios)


def cispo(
    logprobs: Float[Tensor, "tokens"],
    old_logprobs: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLosses:
    """-w A logprob, w = clip(r, 1 - clip_low, 1 + clip_high) without gradient (arXiv:2506.13585, eq. 4).

    The clip bounds how much a token counts and never silences it: its gradient is that of REINFORCE, times w. The paper
    has no lower bound, which is `clip_low` = 1.
    """
    ratio = bounded_exp(logprobs - old_logprobs).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return TokenLosses(loss=-weight * advantages * logprobs, clipped=weight != ratio)


def sapo(
    logprobs: Float[Tensor, "tokens"],
    old_logprobs: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    *,
    gate_positive: float,
    gate_negative: float,
) -> TokenLosses:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau = gate_positive where A > 0, else gate_negative (arXiv:2511.20347).

    A gate that closes gradually takes the place of the clip. At r = 1 the gradient is that of PPO for any tau; a larger
    tau closes sooner on either side. Nothing is ever clipped.
    """
    ratio = bounded_exp(logprobs - old_logprobs)
    steepness = torch.full_like(ratio, gate_negative).masked_fill(advantages > 0, gate_positive)
    gate = 4 / steepness * torch.sigmoid(steepness * (ratio - 1))
    return TokenLosses(loss=-gate * advantages, clipped=torch.zeros_like(advantages, dtype=torch.bool))


def m2po(
    logprobs: Float[Tensor, "tokens"],
    old_logprobs: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    kept_tokens: Shaped[Tensor, "tokens"],
) -> TokenLosses:
    """-r A where the mask is 1, else 0: no clip (arXiv:2510.01161). `kept_tokens` [T] is 1 or 0.

    See `within_second_moment`. The denominator goes on counting the tokens that are left out.
    """
    ratio = bounded_exp(logprobs - old_logprobs)
    return TokenLosses(loss=-kept_tokens * ratio * advantages, clipped=kept_tokens == 0)


@torch.no_grad()
def within_second_moment(
    log_ratios: Float[Tensor, "tokens"], mask: Bool[Tensor, "tokens"], *, limit: float
) -> Bool[Tensor, "tokens"]:
    """[T] bool: the tokens left when those with the largest (log r)^2 are taken out until its mean is at most `limit`.

    The second moment of M2PO (arXiv:2510.01161), over all masked tokens given: a minibatch. Tokens with equal squares
    are kept or left out together, so that the order in which they come decides nothing. Where the smallest square
    alone exceeds the limit, nothing is left. Computed in float64; False outside the mask, whatever stands there.
    """
    squares = log_ratios.double().square()
    ascending = squares[mask].sort().values
    means = running_sums(ascending[None])[0] / torch.arange(1, len(ascending) + 1, device=ascending.device)
    num_within = int((means <= limit).sum())  # the means never fall
    if num_within == len(ascending):
        return mask.clone()
    return mask & (squares < ascending[num_within])


def sequence_ratios(
    logprobs: Float[Tensor, "tokens"],
    old_logprobs: Float[Tensor, "tokens"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
) -> Float[Tensor, "responses"]:
    """[R]: exp of the mean of log r over the masked tokens of each response; 1 for one without any."""
    return _geometric_means(logprobs - old_logprobs, mask, lengths)


def _geometric_means(log_ratios: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    counts = segment_sum(mask.to(log_ratios.dtype), lengths).clamp(min=1)
    return bounded_exp(segment_sum(torch.where(mask, log_ratios, 0), lengths) / counts)


def _clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLosses:
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss, acted = torch.maximum(plain, clipped), clipped > plain
    if dual_clip is not None:
        bound = dual_clip * advantages.abs()  # above every loss where A > 0
        loss, acted = torch.minimum(loss, bound), acted | (loss > bound)
    return TokenLosses(loss=loss, clipped=acted)
