"""From the scores of responses to a reward per token: running moments, scaling, clips, penalties, and the KL.

Shapes: T tokens of R responses, flat; `lengths` gives the tokens of each response. The moments of a run's scores are
passed in and returned.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from proximo.algorithms.masking import (
    broadcast_to_tokens,
    final_value_positions,
    segment_ids,
    segment_sum,
    value_positions,
)

LEAST_SPREAD = 1e-6
"""A standard deviation below this fraction of the mean is rounding of float32 scores, not a spread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningMoments:
    """Count, mean and spread of all scores so far, in float64 as plain numbers, so that JSON keeps every bit."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    @property
    def deviation(self) -> float | None:
        """The unbiased standard deviation, dividing by count - 1; None if the scores have no spread.

        Fewer than two scores, or equal scores, have none. Dividing by their rounding error would give huge numbers.
        """
        if self.count < 2:
            return None
        deviation = math.sqrt(self.squares / (self.count - 1))
        return deviation if deviation > LEAST_SPREAD * abs(self.mean) else None


NOTHING_SEEN = RunningMoments()
"""The moments before the first step."""


def update_moments(moments: RunningMoments, scores: Float[Tensor, "responses"]) -> RunningMoments:
    """The moments with `scores` [R] added (Chan, Golub and LeVeque 1979).

    Computed in float64. Scores that are not finite are left out: one of them would spoil all later moments.
    """
    new = scores.double()
    new = new[new.isfinite()]
    if len(new) == 0:
        return moments
    new_mean = new.mean().item()
    new_squares = (new - new_mean).square().sum().item()
    count = moments.count + len(new)
    shift = new_mean - moments.mean
    return RunningMoments(
        count=count,
        mean=moments.mean + shift * len(new) / count,
        squares=moments.squares + new_squares + shift * shift * moments.count * len(new) / count,
    )


def scale_by_moments(
    scores: Float[Tensor, "responses"], moments: RunningMoments, *, subtract_mean: bool
) -> Float[Tensor, "responses"]:
    """scores / deviation, or (scores - mean) / deviation, of the moments; scores [R], shape and dtype kept.

    Where the moments have no deviation, scores are not divided. Source: the score scaling of TRL's PPO.
    """
    centred = scores - moments.mean if subtract_mean else scores
    return centred / (moments.deviation or 1.0)


def shift_and_scale(scores: Float[Tensor, "*shape"], *, bias: float, scale: float) -> Float[Tensor, "*shape"]:
    """(scores + bias) * scale; shape kept."""
    return (scores + bias) * scale


def fixed_penalties(
    lengths: Int[Tensor, "responses"],
    terminated: Bool[Tensor, "responses"],
    *,
    missing_eos: float,
    min_tokens: int,
    too_short: float,
) -> Float[Tensor, "responses"]:
    """[R] float64: the penalty of each response for a missing end plus that for being short, 0 without either.

    Args:
        lengths: [R] tokens of each response, its end-of-sequence token included.
        terminated: [R] bool, True where the response ended by itself, also with its last possible token.
        missing_eos: penalty where it did not.
        min_tokens: a response of exactly this many tokens is long enough.
        too_short: penalty of a shorter response.
    """
    return (~terminated).double() * missing_eos + (lengths < min_tokens).double() * too_short


def apply_penalties(
    scores: Float[Tensor, "responses"], penalties: Float[Tensor, "responses"], *, replace: bool
) -> Float[Tensor, "responses"]:
    """scores - penalties; with `replace`, -penalty instead of the score where there is one. All [R]."""
    if replace:
        return torch.where(penalties > 0, -penalties, scores)
    return scores - penalties


def overlong_penalty(
    lengths: Int[Tensor, "responses"], *, max_tokens: int, buffer_tokens: int, penalty: float
) -> Float[Tensor, "responses"]:
    """[R] float64: penalty * clip((length - (max_tokens - buffer_tokens)) / buffer_tokens, 0, 1).

    0 up to max_tokens - buffer_tokens, then a line that reaches `penalty` at max_tokens. `lengths` [R] counts tokens.
    Source: arXiv:2503.14476, eq. 13.
    """
    over = (lengths.double() - (max_tokens - buffer_tokens)) / buffer_tokens
    return penalty * over.clamp(0, 1)


def common_score(scores: Sequence[float]) -> float | None:
    """The common value of all scores; None if they differ or there are none."""
    return scores[0] if scores and all(score == scores[0] for score in scores) else None


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
        return torch.where(ends, broadcast_to_tokens(scores, lengths).to(penalty.dtype), 0) - penalty
    earned = torch.where(mask, token_rewards, 0).double()
    left = scores - segment_sum(earned, lengths)
    return (earned + torch.where(ends, broadcast_to_tokens(left, lengths), 0)).to(penalty.dtype) - penalty


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


def _last_in_mask(mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T] bool: True at the last masked token of each response, if it has one."""
    counts_at_end = segment_sum(mask.long(), lengths).cumsum(0)
    return mask & (mask.cumsum(0) == counts_at_end[segment_ids(lengths, device=mask.device)])
