"""From scores to what is rewarded for each response, in one fixed order (docs/ppo.md). Pure: no model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from proximo.algorithms import scores as shaping
from proximo.algorithms.scores import RunningMoments
from proximo.algorithms.segments import final_value_positions, segment_ids, segment_sum
from proximo.algorithms.shaping import clip_scores, prefix_deltas
from proximo.config.ppo.options import PPOConfig
from proximo.records import Finish, Scored


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedScores:
    """What a step makes of its scores."""

    values: Tensor
    """[R] float32: what each response is rewarded with, before any KL; 0 where it has no score."""
    counted: Tensor
    """[R] bool: responses that have a score and count in the step."""
    penalised: Tensor | None
    """[R] bool: counted responses that lost something to a penalty; None where there is no penalty to lose it to."""
    moments: RunningMoments
    """Of all scores of the run so far, this step's included; as they came where nothing is made of them."""
    token_rewards: Tensor | None = None
    """[T] float32: what each token earns of its response's value, scaled as that is; None where no source says."""


def shape_scores(
    scored: Sequence[Scored], counts: Tensor, *, config: PPOConfig, moments: RunningMoments
) -> ShapedScores:
    """Subtract the baseline's score, add the bias and scale, divide by the running deviation, clip, scale, penalise.

    Args:
        scored: R responses.
        counts: [R] bool, False for responses that count nowhere; nothing of them enters the moments.
        config: the section `score` says which of the steps are taken.
        moments: of the scores of all steps before.

    A response without a score (`score.truncated: false`) keeps 0 through all of it, and is in no statistic.
    """
    options = config.score
    scored_ones = torch.tensor([has_score(each, config) for each in scored], dtype=torch.bool)
    counted = scored_ones & counts
    raw = [_raw(each, config) if has else 0.0 for each, has in zip(scored, scored_ones.tolist(), strict=True)]
    # In float64: one rounding, at the end.
    values = torch.tensor(raw, dtype=torch.float64)
    values = shaping.shift_and_scale(values, bias=options.bias, scale=options.scale)
    if options.running != "none":
        moments = shaping.update_moments(moments, values[counted])
        values = shaping.scale_by_moments(values, moments, subtract_mean=options.running == "standardise")
    factor = options.scale / ((moments.deviation or 1.0) if options.running != "none" else 1.0)
    values, earned = _clipped(scored, values, torch.where(scored_ones, factor, 0.0), limit=options.clip)
    if options.truncated_scale != 1:
        values, earned = _scaled_where_cut(scored, values, earned, options.truncated_scale)
    penalised, replaced = None, torch.zeros_like(scored_ones)
    if options.penalises:
        values, penalised, replaced = _penalise(scored, values, config)
    if earned is not None:
        lengths = [len(each.response.token_ids) for each in scored]
        earned = torch.where(replaced[segment_ids(lengths)], 0.0, earned).float()
    return ShapedScores(
        values=torch.where(scored_ones, values, 0.0).float(),
        counted=counted,
        penalised=None if penalised is None else penalised & counted,
        moments=moments,
        token_rewards=earned,
    )


def has_score(scored: Scored, config: PPOConfig) -> bool:
    """False where it could not be scored, and where it was cut and `score.truncated` denies it its score."""
    unscored = scored.response.finish is Finish.LENGTH and not config.score.truncated
    return scored.valid and not unscored


def _raw(scored: Scored, config: PPOConfig) -> float:
    if config.baseline_answer is None:
        return scored.score
    if scored.answer_score is None:
        key = "score.minus_reference_answer" if config.baseline_answer == "reference" else "advantage greedy_baseline"
        raise ValueError(
            f"{key} needs the score of each prompt's {config.baseline_answer} answer, which the trainer asks "
            "its reward source for: use train, or subtract it from the scores that you bring and leave the option out"
        )
    return scored.score - scored.answer_score


def _clipped(
    scored: Sequence[Scored], values: Tensor, factors: Tensor, *, limit: float | None
) -> tuple[Tensor, Tensor | None]:
    """[R] what each response is worth, clipped; and [T] what its tokens earn of that, or None where no source says.

    Where tokens earn something, each number that a source gave one is clipped by itself, and so is what they leave of
    the score: a limit for numbers of single tokens says nothing about their sum. `values` [R] are the scores,
    `factors` [R] what numbers of tokens are multiplied with.
    """
    clip = partial(clip_scores, limit=math.inf if limit is None else limit)
    if all(each.token_rewards is None and each.prefix_scores is None for each in scored):
        return clip(values), None
    lengths = [len(each.response.token_ids) for each in scored]
    own = _rows([each.token_rewards for each in scored], lengths, factors)
    prefixes = _rows([each.prefix_scores for each in scored], [length + 1 for length in lengths], factors)
    rest = clip(values - segment_sum(own, lengths) - prefixes[final_value_positions(lengths)])
    earned = clip(own) + prefix_deltas(clip(prefixes), lengths)
    return rest + segment_sum(earned, lengths), earned


def _scaled_where_cut(
    scored: Sequence[Scored], values: Tensor, earned: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Values [R] and what tokens earn [T] times `scale` in responses that were cut at the limit."""
    factors = torch.tensor([scale if s.response.finish is Finish.LENGTH else 1.0 for s in scored], dtype=torch.float64)
    lengths = [len(each.response.token_ids) for each in scored]
    return values * factors, None if earned is None else earned * factors[segment_ids(lengths)]


def _rows(rows: Sequence[Sequence[float] | None], sizes: Sequence[int], factors: Tensor) -> Tensor:
    """Rows of the given sizes end to end, each times its factor; zeros where there is none."""
    given = [row or (0.0,) * size for row, size in zip(rows, sizes, strict=True)]
    return torch.cat(
        [factor * torch.tensor(row, dtype=torch.float64) for factor, row in zip(factors, given, strict=True)]
    )


def _penalise(scored: Sequence[Scored], values: Tensor, config: PPOConfig) -> tuple[Tensor, Tensor, Tensor]:
    """[R] the values minus all penalties; [R] bool where there was one, and where one took the place of the score."""
    options = config.score
    lengths = torch.tensor([len(each.response.token_ids) for each in scored])
    fixed = shaping.fixed_penalties(
        lengths,
        torch.tensor([each.response.finish.terminated for each in scored], dtype=torch.bool),
        missing_eos=options.missing_eos_penalty or 0.0,
        min_tokens=options.min_tokens or 0,
        too_short=options.min_tokens_penalty or 0.0,
    )
    replace = options.penalty_mode == "replace"
    values, replaced = shaping.apply_penalties(values, fixed, replace=replace), (fixed > 0) & replace
    if options.overlong_buffer_tokens is None:
        return values, fixed > 0, replaced
    overlong = shaping.overlong_penalty(
        lengths,
        max_tokens=config.rollout.max_new_tokens,
        buffer_tokens=options.overlong_buffer_tokens,
        penalty=options.overlong_penalty,
    )
    return values - overlong, (fixed > 0) | (overlong > 0), replaced
