"""From scored responses and log-probs to advantages and returns: which responses count, shaped scores, rewards.

Groups are compared by task rewards: raw scores, before `ppo.score`, penalties and the KL change them. After shaping,
scores of a zero-variance group differ by noise, which standardising would make "phantom advantages". Pure functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from proximo.algorithms import kl
from proximo.algorithms.advantages import (
    ReturnSpread,
    RunningMoments,
    StepRewards,
    clip_scores,
    clip_with_parts,
    overlong_penalty,
    return_spread,
    shape_rewards,
    update_moments,
)
from proximo.algorithms.group_baselines import standardised_in_groups, zero_variance_groups
from proximo.algorithms.masking import (
    masked_mean,
    masked_variance,
    rescale,
    segment_ids,
    segment_sum,
    standardise,
    value_positions,
)
from proximo.config.ppo.options import PPOConfig
from proximo.config.ppo.rewards import KL, RewardKLConfig
from proximo.errors import ConfigError, DataError
from proximo.records import Experience, Finish, Passes, Response, Scored, ScoreState


@dataclass(frozen=True, kw_only=True, slots=True)
class RawAdvantages:
    """Statistics of the advantages before standardising, for the metrics."""

    mean: float
    variance: float
    num_tokens: int
    spread: ReturnSpread


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedScores:
    """Scores of a step after shaping by `ppo.score`, before any KL."""

    values: Tensor
    """[R] float32: shaped score of each response; 0 for a response without a score."""
    counted: Tensor
    """[R] bool: responses that have a score and count in the step."""
    penalised: Tensor | None
    """[R] bool: counted responses that were penalised; None if no penalty is configured."""
    moments: RunningMoments
    """Moments of all scores of the run including this step; unchanged if scores are not normalised."""
    token_rewards: Tensor | None = None
    """[T] float32: part of its response's shaped score that each token earns; None if no source rewards tokens."""


class CountedResponses(NamedTuple):
    """The raw scores of the responses of a step, and which responses count. All [R]."""

    scores: Tensor
    """float64: the score minus that of the answer it is compared with; 0 for a response without a score."""
    have_score: Tensor
    """bool: responses with a score (`has_score`)."""
    counted: Tensor
    """bool: responses that enter baselines and statistics (`counts`)."""
    trained: Tensor
    """bool: responses with tokens in the loss: the counted ones, without excluded groups of zero variance."""


class StepExperience(NamedTuple):
    """The experience of a step, with what its metrics need of the way there."""

    experience: Experience
    raw_advantages: RawAdvantages
    shaped_scores: ShapedScores


def count_responses(scored: Sequence[Scored], config: PPOConfig) -> CountedResponses:
    """The raw scores of the responses of a step, and which of them count.

    A response that is unscored, has no token of the policy, or is cut under `truncation: mask` counts
    nowhere: not in the loss, the baseline of its group, or the standardising. The same holds for an excluded
    zero-variance group, except that its scores enter the running moments.
    """
    have_score = torch.tensor([has_score(s, config) for s in scored], dtype=torch.bool)
    raw = [_raw_score(s, config) if has else 0.0 for s, has in zip(scored, have_score.tolist(), strict=True)]
    counted = trained = counted_mask(scored, config)
    if config.advantage.excludes_zero_variance:
        trained = counted & ~in_zero_variance_group(scored, counted, config)
    return CountedResponses(torch.tensor(raw, dtype=torch.float64), have_score, counted, trained)


def make_experience(
    scored: Sequence[Scored],
    found: CountedResponses,
    passes: Passes,
    penalty: Tensor,
    *,
    config: PPOConfig,
    kl_coefficient: float,
    moments: RunningMoments,
    returns_seen: RunningMoments,
) -> StepExperience:
    """Shape the scores, place them on tokens, subtract the KL, and estimate advantages and returns (docs/ppo.md).

    `penalty`: [T] nats, of `kl_in_reward`. `moments` and `returns_seen`: of the scores and returns of earlier steps.
    The updated ones are returned with the shaped scores and the raw advantages. If the returns of a step hardly
    differ, all its advantages are 0.
    """
    lengths = tuple(len(s.response.token_ids) for s in scored)
    mask = torch.cat([s.response.response_mask for s in scored]) & found.trained[segment_ids(lengths)]
    shaped = shape_scores(scored, found, config=config, moments=moments)
    estimator = config.advantage
    if shaped.token_rewards is not None and not estimator.is_per_token:
        raise ConfigError(
            f"the reward source has token-level rewards, but advantage {estimator.kind} uses one "
            "advantage per response: use gae or a return to go, or return one score per response"
        )
    rewards = shape_rewards(
        penalty, shaped.values, mask, lengths, kl_coefficient=kl_coefficient, token_rewards=shaped.token_rewards
    )
    # Measured before whitening, after which every step has the same spread.
    spread = return_spread(
        rewards, mask, lengths, gamma=estimator.discount, least=estimator.least_relative_spread, seen=returns_seen
    )
    rewards = _whitened(rewards, mask, config)
    # Where the value after the last token stands for what was cut off: by the environment, or at a limit.
    cut_off = {Finish.TRUNCATED, Finish.LENGTH} if config.truncation.bootstraps else {Finish.TRUNCATED}
    step = StepRewards(
        rewards=rewards,
        mask=mask,
        lengths=lengths,
        group_ids=pair_ids(scored) if config.policy_loss.objective.is_pairwise else group_ids(scored),
        counted=found.counted,
        values=passes.values,
        bootstrap=torch.tensor([s.response.finish in cut_off for s in scored], dtype=torch.bool),
        turns=torch.cat([turn_numbers(s.response) for s in scored]),
        old_logprobs=passes.old_logprobs,
        reference_logprobs=passes.reference_logprobs,
    )
    advantages, returns = estimator.estimate(step)
    advantages = torch.where(mask, advantages, 0.0)
    raw = RawAdvantages(
        mean=float(masked_mean(advantages, mask)),
        variance=float(masked_variance(advantages, mask)),
        num_tokens=int(mask.sum()),
        spread=spread,
    )
    if spread.is_flat:
        advantages = torch.zeros_like(advantages)
    correction = int(estimator.unbiased_variance)
    match estimator.standardise:
        case "group":
            advantages = standardised_in_groups(advantages, group_ids(scored), mask, lengths, correction=correction)
        case True:
            advantages = standardise(advantages, mask, correction=correction)
    experience = Experience(
        scored=tuple(scored),
        lengths=lengths,
        mask=mask,
        old_logprobs=passes.old_logprobs,
        reference_logprobs=passes.reference_logprobs,
        values=passes.values,
        rewards=rewards,
        advantages=advantages,
        returns=returns,
        is_flat=spread.is_flat,
    )
    return StepExperience(experience, raw, shaped)


def shape_scores(
    scored: Sequence[Scored], found: CountedResponses, *, config: PPOConfig, moments: RunningMoments
) -> ShapedScores:
    """Shape scores, in this order: baseline, bias and scale, normalising, clip, truncation scale, penalties.

    Args:
        scored: R responses.
        found: their raw scores. Those that do not count do not enter the moments.
        config: its section `score` selects the operations.
        moments: running moments of the scores of all earlier steps.

    A response without a score (cut, with `truncation: unscored`) has shaped score 0 and enters no statistic.
    """
    options, lengths = config.score, [len(s.response.token_ids) for s in scored]
    counted = found.have_score & found.counted
    # In float64, so that the result is rounded to float32 only once, at the end.
    values, deviation = (found.scores + options.bias) * options.scale, 1.0
    if options.normalise != "none":
        moments = update_moments(moments, values[counted])
        deviation = moments.deviation or 1.0
        values = (values - (moments.mean if options.normalise == "standardise" else 0.0)) / deviation
    # Token rewards are scaled by the same factor as the scores, without bias and mean, which belong to the whole.
    factor = options.scale / deviation
    factors = torch.where(found.have_score, factor, 0.0)
    values, earned = _clipped(scored, values, factors, lengths, limit=options.clip)
    if config.truncation.scale != 1:
        cut = [config.truncation.scale if s.response.finish is Finish.LENGTH else 1.0 for s in scored]
        factors = torch.tensor(cut, dtype=torch.float64)
        values, earned = values * factors, None if earned is None else earned * factors[segment_ids(lengths)]
    values, penalised, replaced = _penalised(scored, values, lengths, config)
    if earned is not None:
        earned = torch.where(replaced[segment_ids(lengths)], 0.0, earned).float()
    return ShapedScores(
        values=torch.where(found.have_score, values, 0.0).float(),
        counted=counted,
        penalised=None if penalised is None else penalised & counted,
        moments=moments,
        token_rewards=earned,
    )


def _raw_score(scored: Scored, config: PPOConfig) -> float:
    if (baseline := config.baseline_answer) is None:
        return scored.score
    if scored.answer_score is None:
        key = f"advantage {config.advantage.kind}" if baseline == "greedy" else "score.minus_reference_answer"
        raise ValueError(
            f"{key} subtracts the score of each prompt's {baseline} answer, which only `train` requests from the "
            "reward source: use train, or subtract it from your own scores and remove the option"
        )
    return scored.score - scored.answer_score


def _clipped(
    scored: Sequence[Scored], values: Tensor, factors: Tensor, lengths: Sequence[int], *, limit: float | None
) -> tuple[Tensor, Tensor | None]:
    """Clip scores: [R] clipped scores, and [T] the part that each token earns, or None if no source rewards tokens.

    `values`: [R] scores. `factors`: [R] factors that token rewards of each response are multiplied by.
    """
    if all(s.token_rewards is None and s.prefix_scores is None for s in scored):
        return clip_scores(values, limit), None
    own = _scaled_rows([s.token_rewards for s in scored], lengths, factors)
    prefixes = _scaled_rows([s.prefix_scores for s in scored], [length + 1 for length in lengths], factors)
    return clip_with_parts(values, own, prefixes, lengths, limit=limit)


def _penalised(
    scored: Sequence[Scored], values: Tensor, lengths: Sequence[int], config: PPOConfig
) -> tuple[Tensor, Tensor | None, Tensor]:
    """[R] the scores minus all penalties; [R] bool where there was one, and where one replaced the score.

    The second is None if no penalty is configured.
    """
    options, num_tokens = config.score, torch.tensor(lengths)
    penalties = options.missing_eos_penalty, options.min_tokens, options.overlong_buffer_tokens
    if all(penalty is None for penalty in penalties):
        return values, None, torch.zeros(len(scored), dtype=torch.bool)
    endless = ~torch.tensor([s.response.finish.terminated for s in scored], dtype=torch.bool)
    too_short = num_tokens < (options.min_tokens or 0)
    fixed = endless.double() * (options.missing_eos_penalty or 0.0)
    fixed += too_short.double() * (options.min_tokens_penalty or 0.0)
    penalised, replaced = fixed > 0, (fixed > 0) & (options.penalty_mode == "replace")
    values = torch.where(replaced, -fixed, values - fixed)
    if options.overlong_buffer_tokens is None:
        return values, penalised, replaced
    line = overlong_penalty(
        num_tokens,
        max_tokens=config.rollout.max_new_tokens,
        buffer_tokens=options.overlong_buffer_tokens,
        penalty=options.overlong_penalty,
    )
    return values - line, penalised | (line > 0), replaced


def _scaled_rows(rows: Sequence[Sequence[float] | None], sizes: Sequence[int], factors: Tensor) -> Tensor:
    """[sum of sizes] float64: rows end to end, each times its factor of `factors` [R]; zeros where there is none."""
    filled = [torch.tensor(row or (0.0,) * size, dtype=torch.float64) for row, size in zip(rows, sizes, strict=True)]
    return torch.cat([factor * row for factor, row in zip(factors, filled, strict=True)])


def kl_in_reward(passes: Passes, config: KL) -> Tensor:
    """[T] nats: the KL that is subtracted from the reward of each token, before the coefficient; 0 without one."""
    if not isinstance(config, RewardKLConfig):
        return torch.zeros_like(passes.old_logprobs)
    given = passes.full_kl if config.estimator == "full" else passes.reference_logprobs
    if given is None:
        raise ValueError(f"the KL in the reward, by {config.estimator}, needs what the reference says of the responses")
    if config.estimator != "full":
        given = kl.ESTIMATES[config.estimator](passes.old_logprobs, given)
    return kl.clamped(given, config.clamp)


def _whitened(rewards: Tensor, mask: Tensor, config: PPOConfig) -> Tensor:
    # Both functions leave 0 outside the mask, so masked-out tokens do not reach earlier tokens through the estimator.
    correction = int(config.advantage.unbiased_variance)
    if config.score.whiten_rewards == "zero_mean":
        return standardise(rewards, mask, correction=correction)
    return rescale(rewards, mask, correction=correction) if config.score.whiten_rewards == "keep_mean" else rewards


def counts(scored: Scored, config: PPOConfig) -> bool:
    """Whether a response counts in its step: it was scored, has a policy token, and is not masked as truncated."""
    cut = scored.response.finish is Finish.LENGTH and config.truncation.masks
    return scored.valid and bool(scored.response.response_mask.any()) and not cut


def counted_mask(scored: Sequence[Scored], config: PPOConfig) -> Tensor:
    """[R] bool: `counts` of each response."""
    return torch.tensor([counts(s, config) for s in scored], dtype=torch.bool)


def turn_numbers(response: Response) -> Tensor:
    """[T] int64: the turn in which the policy wrote each token, from 0; -1 where it did not write it."""
    numbers = response.response_mask.long() - 1
    for number, turn in enumerate(response.episode.turns if response.episode else ()):
        numbers[turn.start : turn.end] = number
    return numbers


def token_values(experience: Experience) -> Tensor:
    """[T] the value before each response token, without the value after the last one."""
    if experience.values is None:
        raise ValueError("this experience was made without a critic")
    return experience.values[value_positions(experience.lengths)]


def has_score(scored: Scored, config: PPOConfig) -> bool:
    """Whether a response has a score.

    False if scoring failed, or it was cut and `truncation` gives it none. What an environment gave before the cut stays
    a trajectory's own where the value of the rest is added.
    """
    response, truncation = scored.response, config.truncation
    earned = response.episode is not None and truncation.bootstraps
    return scored.valid and (response.finish is not Finish.LENGTH or truncation.keeps_score or earned)


def group_ids(scored: Sequence[Scored]) -> Tensor:
    """[R] group index of each response: responses to one prompt have the same index."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(s.response.prompt.id, len(numbers)) for s in scored])


def pair_ids(scored: Sequence[Scored]) -> Tensor:
    """[R] index of the pair of each response: 2 i and 2 i + 1 are a pair.

    Raises DataError if they are not two responses to one prompt.
    """
    prompts = [s.response.prompt.id for s in scored]
    if len(prompts) % 2 or prompts[::2] != prompts[1::2]:
        raise DataError(
            "policy_loss.objective online_dpo and online_ipo compare two responses to each prompt, one after the "
            f"other; the {len(prompts)} given responses do not come in such pairs"
        )
    return torch.arange(len(scored)) // 2


def task_reward_of(scored: Scored, name: str | None) -> float:
    """The task reward of a scored response: the component `name` of its score, or the whole score for None.

    0 for a faulty response (MODEL_FAULT) without that component. Raises ConfigError if another response lacks it.
    """
    if name is None:
        return scored.score
    if name not in scored.components:
        if scored.state is ScoreState.MODEL_FAULT:
            return 0.0
        raise ConfigError(
            f"ppo.task_reward is {name}, but the reward gave no component of that name; it gave: "
            f"{', '.join(sorted(scored.components)) or 'none'}"
        )
    return scored.components[name]


def in_zero_variance_group(scored: Sequence[Scored], counted: Tensor, config: PPOConfig) -> Tensor:
    """[R] bool: responses in a group whose counted responses all have the same task reward. `counted`: [R] bool.

    True also for the only response of a group, which has nothing to be compared with.
    """
    task_rewards = [
        task_reward_of(s, config.task_reward) if is_counted else 0.0
        for s, is_counted in zip(scored, counted, strict=True)
    ]
    return zero_variance_groups(torch.tensor(task_rewards, dtype=torch.float64), group_ids(scored), counted)


def counted_responses(experience: Experience) -> list[int]:
    """Indices of the responses with at least one token in the mask."""
    return [i for i, part in enumerate(experience.mask.split(list(experience.lengths))) if part.any()]


def sequence_kl(experience: Experience) -> list[float | None]:
    """Sum of k1 over the masked-in tokens of each response, in nats; None in a run without a reference."""
    if experience.reference_logprobs is None:
        return [None] * len(experience.lengths)
    per_token = kl.k1(experience.old_logprobs, experience.reference_logprobs)
    return list(segment_sum(torch.where(experience.mask, per_token, 0.0), experience.lengths).tolist())
