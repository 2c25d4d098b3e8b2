"""From scores to what is rewarded, one number per response, in one fixed order (docs/ppo.md). Pure: no model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.algorithms import scores as shaping
from proximo.algorithms.scores import RunningMoments
from proximo.algorithms.shaping import clip_scores
from proximo.config.ppo import PPOConfig
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


def shape_scores(
    scored: Sequence[Scored], counts: Tensor, *, config: PPOConfig, moments: RunningMoments
) -> ShapedScores:
    """Subtract the answer's score, add the bias and scale, divide by the running deviation, clip, penalise.

    Args:
        scored: R responses.
        counts: [R] bool, False for responses that count nowhere; nothing of them enters the moments.
        config: the section `score` says which of the steps are taken.
        moments: of the scores of all steps before.

    A response without a score (`score.truncated: false`) keeps 0 through all of it, and is in no statistic.
    """
    options = config.score
    has_score = torch.tensor([_has_score(each, config) for each in scored], dtype=torch.bool)
    counted = has_score & counts
    raw = [_raw(each, config) if has else 0.0 for each, has in zip(scored, has_score.tolist(), strict=True)]
    # In float64: one rounding, at the end.
    values = torch.tensor(raw, dtype=torch.float64)
    values = shaping.shift_and_scale(values, bias=options.bias, scale=options.scale)
    if options.running != "none":
        moments = shaping.update_moments(moments, values[counted])
        values = shaping.scale_by_moments(values, moments, subtract_mean=options.running == "standardise")
    if options.clip is not None:
        values = clip_scores(values, options.clip)
    penalised = None
    if options.penalises:
        values, penalised = _penalise(scored, values, config)
    return ShapedScores(
        values=torch.where(has_score, values, 0.0).float(),
        counted=counted,
        penalised=None if penalised is None else penalised & counted,
        moments=moments,
    )


def _has_score(scored: Scored, config: PPOConfig) -> bool:
    unscored = scored.response.finish is Finish.LENGTH and not config.score.truncated
    return scored.valid and not unscored


def _raw(scored: Scored, config: PPOConfig) -> float:
    if not config.score.minus_reference_answer:
        return scored.score
    if scored.answer_score is None:
        raise ValueError(
            "score.minus_reference_answer needs the score of each prompt's reference answer, which the trainer asks "
            "its reward source for: use train, or subtract it from the scores that you bring and leave the option out"
        )
    return scored.score - scored.answer_score


def _penalise(scored: Sequence[Scored], values: Tensor, config: PPOConfig) -> tuple[Tensor, Tensor]:
    """[R] the values minus all penalties, and [R] bool where there was one."""
    options = config.score
    lengths = torch.tensor([len(each.response.token_ids) for each in scored])
    fixed = shaping.fixed_penalties(
        lengths,
        torch.tensor([each.response.finish.terminated for each in scored], dtype=torch.bool),
        missing_eos=options.missing_eos_penalty or 0.0,
        min_tokens=options.min_tokens or 0,
        too_short=options.min_tokens_penalty or 0.0,
    )
    values = shaping.apply_penalties(values, fixed, replace=options.penalty_mode == "replace")
    if options.overlong_buffer_tokens is None:
        return values, fixed > 0
    overlong = shaping.overlong_penalty(
        lengths,
        max_tokens=config.rollout.max_new_tokens,
        buffer_tokens=options.overlong_buffer_tokens,
        penalty=options.overlong_penalty,
    )
    return values - overlong, (fixed > 0) | (overlong > 0)
