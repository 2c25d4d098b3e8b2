"""From scores to what is rewarded for each response, in one fixed order (docs/ppo.md). Pure: no model."""

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
    if options.clip is not None:
        values = clip_scores(values, options.clip)
    of_ending = [options.truncated_scale if each.response.finish is Finish.LENGTH else 1.0 for each in scored]
    of_ending = torch.tensor(of_ending, dtype=torch.float64)
    values = values * of_ending
    penalised, replaced = None, torch.zeros_like(scored_ones)
    if options.penalises:
        values, penalised, replaced = _penalise(scored, values, config)
    factor = of_ending * options.scale / ((moments.deviation or 1.0) if options.running != "none" else 1.0)
    return ShapedScores(
        values=torch.where(scored_ones, values, 0.0).float(),
        counted=counted,
        penalised=None if penalised is None else penalised & counted,
        moments=moments,
        token_rewards=_token_rewards(scored, torch.where(scored_ones & ~replaced, factor, 0.0)),
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


def _token_rewards(scored: Sequence[Scored], factors: Tensor) -> Tensor | None:
    """[T] with the factor [R] of each response; all 0 for one whose score sits on its last token alone."""
    if all(each.token_rewards is None for each in scored):
        return None
    rows = [each.token_rewards or (0.0,) * len(each.response.token_ids) for each in scored]
    parts = [factor * torch.tensor(row, dtype=torch.float64) for factor, row in zip(factors, rows, strict=True)]
    return torch.cat(parts).float()


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
