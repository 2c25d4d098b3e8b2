"""Makes one reward per token from the score of each response, its per-token parts and the KL.

Shapes: T tokens of R responses, flat; `lengths` gives the tokens of each response.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from proximo.algorithms.flat_layout import final_value_positions, segment_ids, segment_sum, value_positions


def shape_rewards(
    kl_per_token: Float[Tensor, "tokens"],
    scores: Float[Tensor, "responses"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    *,
    kl_coefficient: float,
    token_rewards: Float[Tensor, "tokens"] | None = None,
) -> Float[Tensor, "tokens"]:
    """r_t = -kl_coefficient * kl_t, plus the score, once, at the last token that the policy wrote (arXiv:1909.08593).

    With `token_rewards` each token gets its own part of the score, and the last token the remainder. Without KL the
    rewards of a response sum to its score in both cases.

    Args:
        kl_per_token: [T] nats, any of `proximo.algorithms.kl`; zeros in a run without KL.
        scores: [R] one per response; unread where a response has no token in the mask.
        mask: [T] bool, True where the policy wrote the token; rewards are 0 elsewhere.
        lengths: [R] tokens of each response.
        kl_coefficient: reward lost per nat.
        token_rewards: [T] or None; unread outside the mask.

    Returns:
        [T] in the dtype of `kl_per_token`. If a tool wrote the last tokens of a response, its score is before them, at
        the policy's last action.
    """
    ends = _last_in_mask(mask, lengths)
    penalty = torch.where(mask, kl_per_token, 0) * kl_coefficient
    if token_rewards is None:
        return torch.where(ends, _at_tokens(scores, lengths).to(penalty.dtype), 0) - penalty
    earned = torch.where(mask, token_rewards, 0).double()
    left = scores - segment_sum(earned, lengths)
    return (earned + torch.where(ends, _at_tokens(left, lengths), 0)).to(penalty.dtype) - penalty


def prefix_deltas(prefix_scores: Float[Tensor, "states"], lengths: Sequence[int]) -> Float[Tensor, "tokens"]:
    """r_t = s_t - s_(t-1), the change of each token to the score of the prompt with the response so far.

    Args:
        prefix_scores: [T + R] s_0, the score of the prompt alone, and s_t after each token, response by response.
        lengths: [R] tokens of each response.

    Returns:
        [T], summing over a response to s_n - s_0. This is shaping by a potential (Ng, Harada and Russell 1999): with
        gamma = 1 the expected policy gradient is that of s_n alone, since s_0 does not depend on the response.
    """
    before = value_positions(lengths, device=prefix_scores.device)
    return prefix_scores[before + 1] - prefix_scores[before]


def clip_scores(scores: Float[Tensor, "*shape"], limit: float | None) -> Float[Tensor, "*shape"]:
    """Scores cut to [-limit, limit], unchanged for None; shape kept. NaN stays NaN."""
    return scores if limit is None else scores.clamp(-limit, limit)


def scaled_rows(
    rows: Sequence[Sequence[float] | None], sizes: Sequence[int], factors: Float[Tensor, "responses"]
) -> Float[Tensor, "tokens"]:
    """[sum of sizes] float64: rows end to end, each times its factor of `factors` [R]; zeros where there is none."""
    filled_rows = [row or (0.0,) * size for row, size in zip(rows, sizes, strict=True)]
    return torch.cat(
        [factor * torch.tensor(row, dtype=torch.float64) for factor, row in zip(factors, filled_rows, strict=True)]
    )


def clip_with_parts(
    values: Float[Tensor, "responses"],
    token_rewards: Float[Tensor, "tokens"],
    prefix_scores: Float[Tensor, "states"],
    lengths: Sequence[int],
    *,
    limit: float | None,
) -> tuple[Float[Tensor, "responses"], Float[Tensor, "tokens"]]:
    """[R] clipped scores, and [T] the parts of the tokens.

    The number of each token is clipped separately, and so is the remainder of the score: a limit for single tokens
    does not bound their sum.

    Args:
        values: [R] one per response, its tokens' part included.
        token_rewards: [T]; zeros where a source gave none.
        prefix_scores: [T + R], as in `prefix_deltas`; zeros where a source gave none.
        lengths: [R] tokens of each response.
        limit: each number is cut to [-limit, limit]; None cuts none.
    """
    rest = values - segment_sum(token_rewards, lengths) - prefix_scores[final_value_positions(lengths)]
    earned = clip_scores(token_rewards, limit) + prefix_deltas(clip_scores(prefix_scores, limit), lengths)
    return clip_scores(rest, limit) + segment_sum(earned, lengths), earned


def _at_tokens(per_response: Tensor, lengths: Sequence[int]) -> Tensor:
    """Repeats a number of each response at each of its tokens: [T] from [R]."""
    return per_response[segment_ids(lengths, device=per_response.device)]


def _last_in_mask(mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T] bool: True at the last masked token of each response, if it has one."""
    counts_at_end = segment_sum(mask.long(), lengths).cumsum(0)
    return mask & (mask.cumsum(0) == counts_at_end[segment_ids(lengths, device=mask.device)])
