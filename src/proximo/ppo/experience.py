"""Computes rewards, advantages and returns from scored responses and log-probs. Pure functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from proximo.algorithms import advantages as estimators
from proximo.algorithms import kl
from proximo.algorithms import score_transforms as score_shaping
from proximo.algorithms.advantages import standardised_in_groups
from proximo.algorithms.flat_layout import segment_ids, segment_sum
from proximo.algorithms.masking import masked_mean, masked_variance, rescale, standardise
from proximo.algorithms.return_spread import ReturnSpread, return_spread
from proximo.algorithms.score_transforms import NOTHING_SEEN, RunningMoments
from proximo.algorithms.shaping import clip_scores, clip_with_parts, scaled_rows, shape_rewards
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError
from proximo.ppo.counted import counted_mask, group_ids, has_score, in_zero_variance_group, pair_ids
from proximo.ppo.train_state import TrainState
from proximo.records import Experience, Finish, Passes, Scored


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


class StepExperience(NamedTuple):
    """The experience of a step, with what its metrics need of the way there."""

    experience: Experience
    raw_advantages: RawAdvantages
    shaped_scores: ShapedScores


def experience_of(scored: Sequence[Scored], passes: Passes, state: TrainState, *, config: PPOConfig) -> StepExperience:
    """`make_experience` with the coefficient and the moments of a run's state."""
    return make_experience(
        scored,
        passes,
        config=config,
        kl_coefficient=state.kl_coefficient,
        moments=state.score_moments,
        returns_seen=state.return_moments,
    )


def make_experience(
    scored: Sequence[Scored],
    passes: Passes,
    *,
    config: PPOConfig,
    kl_coefficient: float,
    moments: RunningMoments = NOTHING_SEEN,
    returns_seen: RunningMoments = NOTHING_SEEN,
) -> StepExperience:
    """Shape the scores, place them on tokens, subtract the KL, and estimate advantages and returns (docs/ppo.md).

    A response that is unscored, has no token of the policy, or is truncated under `truncation_value: mask` counts
    nowhere: not in the loss, the baseline of its group, or the standardising. The same holds for an excluded
    zero-variance group, except that its scores enter the running moments.

    `moments` and `returns_seen`: moments of the scores and returns of earlier steps. The updated ones are returned with
    the shaped scores and the raw advantages. If the returns of a step hardly differ, all its advantages are 0.
    """
    lengths = tuple(len(s.response.token_ids) for s in scored)
    counted = counted_mask(scored, config)
    trained = counted
    if config.advantage.excludes_zero_variance:
        trained = counted & ~in_zero_variance_group(scored, counted, config)
    mask = torch.cat([s.response.response_mask for s in scored]) & trained[segment_ids(lengths)]
    shaped = shape_scores(scored, counted, config=config, moments=moments)
    if shaped.token_rewards is not None and not config.advantage.is_per_token:
        raise ConfigError(
            f"the reward source has token-level rewards, but advantage {config.advantage.estimator} uses one "
            "advantage per response: use gae or a return to go, or return one score per response"
        )
    rewards = _rewards(shaped, passes, mask, lengths, config=config, kl_coefficient=kl_coefficient)
    least = config.advantage.least_spread if config.uses_critic else None
    # Measured before whitening, after which every step has the same spread.
    spread = return_spread(rewards, mask, lengths, gamma=config.advantage.gamma, least=least, seen=returns_seen)
    rewards = _whitened(rewards, mask, config)
    advantages, returns = estimate_advantages(scored, rewards, passes.values, mask, counted, config=config)
    advantages = torch.where(mask, advantages, 0.0)
    raw = RawAdvantages(
        mean=float(masked_mean(advantages, mask)),
        variance=float(masked_variance(advantages, mask)),
        num_tokens=int(mask.sum()),
        spread=spread,
    )
    if spread.is_flat:
        advantages = torch.zeros_like(advantages)
    correction = int(config.advantage.unbiased_variance)
    match config.advantage.standardises:
        case "group":
            groups = group_ids(scored)
            advantages = standardised_in_groups(advantages, groups, mask, lengths, correction=correction)
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
    scored: Sequence[Scored], counts: Tensor, *, config: PPOConfig, moments: RunningMoments
) -> ShapedScores:
    """Shape scores, in this order: baseline, bias and scale, normalising, clip, truncation scale, penalties.

    Args:
        scored: R responses.
        counts: [R] bool, False for responses that count nowhere. They do not enter the moments.
        config: its section `score` selects the operations.
        moments: running moments of the scores of all earlier steps.

    A response without a score (`score.score_truncated: false`) has shaped score 0 and enters no statistic.
    """
    options, lengths = config.score, [len(s.response.token_ids) for s in scored]
    have_score = torch.tensor([has_score(s, config) for s in scored], dtype=torch.bool)
    counted = have_score & counts
    raw = [_raw_score(s, config) if has else 0.0 for s, has in zip(scored, have_score.tolist(), strict=True)]
    # float64, so that the result is rounded to float32 only once, at the end.
    values = torch.tensor(raw, dtype=torch.float64)
    values = score_shaping.shift_and_scale(values, bias=options.bias, scale=options.scale)
    if options.normalise != "none":
        moments = score_shaping.update_moments(moments, values[counted])
        values = score_shaping.scale_by_moments(values, moments, subtract_mean=options.normalise == "standardise")
    # Token rewards are scaled by the same factor as the scores, without bias and mean, which belong to the whole.
    factor = options.scale / ((moments.deviation or 1.0) if options.normalise != "none" else 1.0)
    factors = torch.where(have_score, factor, 0.0)
    values, earned = _clipped(scored, values, factors, lengths, limit=options.clip)
    if options.truncated_scale != 1:
        cut = [options.truncated_scale if s.response.finish is Finish.LENGTH else 1.0 for s in scored]
        factors = torch.tensor(cut, dtype=torch.float64)
        values, earned = values * factors, None if earned is None else earned * factors[segment_ids(lengths)]
    penalised, replaced = None, torch.zeros_like(have_score)
    if options.penalises:
        values, penalised, replaced = _penalised(scored, values, lengths, config)
    if earned is not None:
        earned = torch.where(replaced[segment_ids(lengths)], 0.0, earned).float()
    return ShapedScores(
        values=torch.where(have_score, values, 0.0).float(),
        counted=counted,
        penalised=None if penalised is None else penalised & counted,
        moments=moments,
        token_rewards=earned,
    )


def _raw_score(scored: Scored, config: PPOConfig) -> float:
    if config.baseline_answer is None:
        return scored.score
    if scored.answer_score is None:
        key = "score.minus_reference_answer" if config.baseline_answer == "reference" else "advantage greedy_baseline"
        raise ValueError(
            f"{key} needs the score of each prompt's {config.baseline_answer} answer, which only `train` requests "
            "from the reward source: use train, or subtract it from your own scores and remove the option"
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
    own = scaled_rows([s.token_rewards for s in scored], lengths, factors)
    prefixes = scaled_rows([s.prefix_scores for s in scored], [length + 1 for length in lengths], factors)
    return clip_with_parts(values, own, prefixes, lengths, limit=limit)


def _penalised(
    scored: Sequence[Scored], values: Tensor, lengths: Sequence[int], config: PPOConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the configured penalties. Returns the results of `algorithms/score_transforms.py::penalise`."""
    options = config.score
    return score_shaping.penalise(
        values,
        torch.tensor(lengths),
        torch.tensor([s.response.finish.terminated for s in scored], dtype=torch.bool),
        missing_eos=options.missing_eos_penalty or 0.0,
        min_tokens=options.min_tokens or 0,
        too_short=options.min_tokens_penalty or 0.0,
        replace=options.penalty_mode == "replace",
        max_tokens=config.rollout.max_new_tokens,
        overlong=options.overlong_penalty,
        buffer_tokens=options.overlong_buffer_tokens,
    )


def _rewards(
    shaped: ShapedScores,
    passes: Passes,
    mask: Tensor,
    lengths: Sequence[int],
    *,
    config: PPOConfig,
    kl_coefficient: float,
) -> Tensor:
    penalty = torch.zeros_like(passes.old_logprobs)
    if config.kl.apply_to == "reward":
        penalty = kl.clamped(_kl_per_token(passes, config.kl.estimator), config.kl.clamp)
    return shape_rewards(
        penalty, shaped.values, mask, lengths, kl_coefficient=kl_coefficient, token_rewards=shaped.token_rewards
    )


def _kl_per_token(passes: Passes, estimator: str) -> Tensor:
    if estimator == "full":
        if passes.full_kl is None:
            raise ValueError("estimator full needs the KL over the vocabulary from the reference call")
        return passes.full_kl
    if passes.reference_logprobs is None:
        raise ValueError(f"estimator {estimator} needs reference log-probs")
    return kl.ESTIMATES[estimator](passes.old_logprobs, passes.reference_logprobs)


def _whitened(rewards: Tensor, mask: Tensor, config: PPOConfig) -> Tensor:
    # Both functions leave 0 outside the mask, so masked-out tokens do not reach earlier tokens through the estimator.
    correction = int(config.advantage.unbiased_variance)
    if config.score.whiten_rewards == "zero_mean":
        return standardise(rewards, mask, correction=correction)
    return rescale(rewards, mask, correction=correction) if config.score.whiten_rewards == "keep_mean" else rewards


def estimate_advantages(
    scored: Sequence[Scored],
    rewards: Tensor,
    values: Tensor | None,
    mask: Tensor,
    counts: Tensor,
    *,
    config: PPOConfig,
) -> tuple[Tensor, Tensor | None]:
    """Advantages [T] before standardising, and returns [T], the targets of the value model; None without a critic.

    `counts`: [R] bool, whether a response enters baselines. `rewards`: [T], read only inside the mask.
    """
    lengths = [len(s.response.token_ids) for s in scored]
    if config.uses_critic:
        if values is None:
            raise ValueError("advantage gae needs values")
        return _gae(scored, rewards, values, mask, lengths, config=config)
    gamma = config.advantage.gamma
    if config.advantage.estimator in ("return_to_go", "greedy_baseline"):  # the score already contains the baseline
        return estimators.returns_to_go(rewards, mask, lengths, gamma=gamma), None
    groups = pair_ids(scored) if config.policy_loss.is_pairwise else group_ids(scored)
    if config.advantage.estimator == "group_return_to_go":
        return estimators.group_returns_to_go(rewards, groups, counts, mask, lengths, gamma=gamma), None
    # The other estimators compare whole returns (score and KL penalty) within a group; all tokens get the result.
    compare: Callable[[Tensor, Tensor, Tensor], Tensor] = {
        "group_centred": estimators.group_centred,
        "group_standardised": estimators.group_standardised,
        "leave_one_out": estimators.leave_one_out,
        "length_weighted": partial(estimators.length_weighted, num_tokens=segment_sum(mask.long(), lengths)),
        "pass_at_k": partial(estimators.pass_at_k, k=config.advantage.k),
    }[config.advantage.estimator]
    return estimators.broadcast_to_tokens(compare(segment_sum(rewards, lengths), groups, counts), lengths), None


def _gae(
    scored: Sequence[Scored],
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    *,
    config: PPOConfig,
) -> tuple[Tensor, Tensor]:
    """GAE advantages and returns. Returns may have a lambda of their own (VAPO, arXiv:2504.05118)."""
    bootstraps = config.truncation_value == "bootstrap"
    bootstrap = torch.tensor([bootstraps and s.response.finish is Finish.LENGTH for s in scored])
    advantage = config.advantage

    def with_lam(lam: float | Tensor) -> tuple[Tensor, Tensor]:
        return estimators.gae(rewards, values, mask, lengths, bootstrap=bootstrap, gamma=advantage.gamma, lam=lam)

    lam: float | Tensor = advantage.gae_lambda
    if advantage.length_adaptive is not None:
        # Length in tokens of the policy: tool output does not count.
        num_tokens = segment_sum(mask.to(rewards.dtype), lengths)
        lam = estimators.length_adaptive_lam(num_tokens, alpha=advantage.length_adaptive)
    advantages, returns = with_lam(lam)
    return advantages, returns if advantage.value_gae_lambda is None else with_lam(advantage.value_gae_lambda)[1]
