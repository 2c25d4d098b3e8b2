"""Transforms of scores, one per response, before `shaping.py` places them on tokens: moments, scaling, penalties.

Shapes: R responses. Every function is pure; the moments of a run's scores are passed in and returned.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

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


def penalise(  # noqa: PLR0913 - the arguments of three functions
    scores: Float[Tensor, "responses"],
    lengths: Int[Tensor, "responses"],
    terminated: Bool[Tensor, "responses"],
    *,
    missing_eos: float,
    min_tokens: int,
    too_short: float,
    replace: bool,
    max_tokens: int,
    buffer_tokens: int | None,
    overlong: float,
) -> tuple[Float[Tensor, "responses"], Bool[Tensor, "responses"], Bool[Tensor, "responses"]]:
    """[R] the scores minus all penalties; [R] bool where there was one, and where one replaced the score.

    `replace` applies only to the fixed penalties. The penalty of overlong responses is always subtracted; there is
    none if `buffer_tokens` is None. The other arguments are those of the three functions above.
    """
    fixed = fixed_penalties(lengths, terminated, missing_eos=missing_eos, min_tokens=min_tokens, too_short=too_short)
    values, replaced = apply_penalties(scores, fixed, replace=replace), (fixed > 0) & replace
    if buffer_tokens is None:
        return values, fixed > 0, replaced
    line = overlong_penalty(lengths, max_tokens=max_tokens, buffer_tokens=buffer_tokens, penalty=overlong)
    return values - line, (fixed > 0) | (line > 0), replaced


def common_score(scores: Sequence[float]) -> float | None:
    """The common value of all scores; None if they differ or there are none."""
    return scores[0] if scores and all(score == scores[0] for score in scores) else None
