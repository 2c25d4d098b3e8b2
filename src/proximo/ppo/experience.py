"""From scored responses and log-probs to rewards, advantages and returns. Pure: no model, no optimizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from proximo.algorithms import advantages as estimators
from proximo.algorithms import kl
from proximo.algorithms import scores as shaping
from proximo.algorithms.advantages import standardised_in_groups
from proximo.algorithms.masking import masked_mean, masked_variance, rescale, standardise
from proximo.algorithms.return_spread import ReturnSpread, return_spread
from proximo.algorithms.scores import NOTHING_SEEN, RunningMoments
from proximo.algorithms.segments import segment_ids, segment_sum
from proximo.algorithms.shaping import clip_scores, clip_with_parts, scaled_rows, shape_rewards
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError
from proximo.ppo.counted import counted_ones, equal_outcomes, group_numbers, has_score
from proximo.records import Experience, Finish, Passes, Scored


@dataclass(frozen=True, kw_only=True, slots=True)
class RawAdvantages:
    """What advantages were before they were standardised, for the metrics."""

    mean: float
    variance: float
    num_tokens: int
    spread: ReturnSpread


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


def make_experience(
    scored: Sequence[Scored],
    passes: Passes,
    *,
    config: PPOConfig,
    kl_coefficient: float,
    moments: RunningMoments = NOTHING_SEEN,
    returns_seen: RunningMoments = NOTHING_SEEN,
) -> tuple[Experience, RawAdvantages, ShapedScores]:
    """Shape and place the scores, subtract the KL, estimate advantages and returns (docs/ppo.md).

    A response that could not be scored, has no token of the policy, or is cut off under `truncation_value: mask` counts
    nowhere: not in the loss, not in its group's baseline, not in the standardising. Nor does a group that is left out
    because its outcomes are equal, but for the running moments of scores. `moments` are of the scores of the steps
    before, `returns_seen` of their returns; those to go on with come back with the shaped scores and the raw
    advantages. In a step without spread all advantages are 0.
    """
    lengths = tuple(len(s.response.token_ids) for s in scored)
    counted = counted_ones(scored, config)
    learned = counted
    if config.advantage.zero_variance_groups == "exclude":
        learned = counted & ~equal_outcomes(scored, counted, config)
    mask = torch.cat([s.response.response_mask for s in scored]) & learned[segment_ids(lengths)]
    shaped = shape_scores(scored, counted, config=config, moments=moments)
    if shaped.token_rewards is not None and not config.advantage.goes_by_token:
        raise ConfigError(
            f"the reward source has token-level rewards, but advantage {config.advantage.estimator} uses one "
            "advantage per response: use gae or a return to go, or return one score per response"
        )
    rewards = _rewards(shaped, passes, mask, lengths, config=config, kl_coefficient=kl_coefficient)
    least = config.advantage.least_spread if config.uses_critic else None
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
            groups = group_numbers(scored)
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
    return experience, raw, shaped


def shape_scores(
    scored: Sequence[Scored], counts: Tensor, *, config: PPOConfig, moments: RunningMoments
) -> ShapedScores:
    """Subtract the baseline's score, add the bias and scale, divide by the running deviation, clip, scale, penalise.

    Args:
        scored: R responses.
        counts: [R] bool, False for responses that count nowhere; nothing of them enters the moments.
        config: the section `score` says which of the steps are taken.
        moments: of the scores of all steps before.

    A response without a score (`score.score_truncated: false`) keeps 0 through all of it, and is in no statistic.
    """
    options, lengths = config.score, [len(each.response.token_ids) for each in scored]
    scored_ones = torch.tensor([has_score(each, config) for each in scored], dtype=torch.bool)
    counted = scored_ones & counts
    raw = [_raw(each, config) if has else 0.0 for each, has in zip(scored, scored_ones.tolist(), strict=True)]
    # In float64: one rounding, at the end.
    values = torch.tensor(raw, dtype=torch.float64)
    values = shaping.shift_and_scale(values, bias=options.bias, scale=options.scale)
    if options.normalise != "none":
        moments = shaping.update_moments(moments, values[counted])
        values = shaping.scale_by_moments(values, moments, subtract_mean=options.normalise == "standardise")
    factor = options.scale / ((moments.deviation or 1.0) if options.normalise != "none" else 1.0)
    factors = torch.where(scored_ones, factor, 0.0)
    values, earned = _clipped(scored, values, factors, lengths, limit=options.clip)
    if options.truncated_scale != 1:
        cut = [options.truncated_scale if s.response.finish is Finish.LENGTH else 1.0 for s in scored]
        factors = torch.tensor(cut, dtype=torch.float64)
        values, earned = values * factors, None if earned is None else earned * factors[segment_ids(lengths)]
    penalised, replaced = None, torch.zeros_like(scored_ones)
    if options.penalises:
        values, penalised, replaced = _penalised(scored, values, lengths, config)
    if earned is not None:
        earned = torch.where(replaced[segment_ids(lengths)], 0.0, earned).float()
    return ShapedScores(
        values=torch.where(scored_ones, values, 0.0).float(),
        counted=counted,
        penalised=None if penalised is None else penalised & counted,
        moments=moments,
        token_rewards=earned,
    )


def _raw(scored: Scored, config: PPOConfig) -> float:
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
    """[R] what each response is worth, clipped; and [T] what its tokens earn of that, or None where no source says.

    `values` [R] are the scores, `factors` [R] what numbers of tokens are multiplied with.
    """
    if all(each.token_rewards is None and each.prefix_scores is None for each in scored):
        return clip_scores(values, limit), None
    own = scaled_rows([each.token_rewards for each in scored], lengths, factors)
    prefixes = scaled_rows([each.prefix_scores for each in scored], [length + 1 for length in lengths], factors)
    return clip_with_parts(values, own, prefixes, lengths, limit=limit)


def _penalised(
    scored: Sequence[Scored], values: Tensor, lengths: Sequence[int], config: PPOConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """As `algorithms/scores.py::penalise` returns it."""
    options = config.score
    return shaping.penalise(
        values,
        torch.tensor(lengths),
        torch.tensor([each.response.finish.terminated for each in scored], dtype=torch.bool),
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
    # Both leave 0 outside the mask, so that nothing of them reaches an earlier token through the estimator.
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
    """Advantages [T], not yet standardised, and the value model's targets [T]; None without a critic.

    `counts` [R]: whether a response has a part in baselines. `rewards` [T] are read on the mask alone.
    """
    lengths = [len(s.response.token_ids) for s in scored]
    if config.uses_critic:
        if values is None:
            raise ValueError("advantage gae needs values")
        return _gae(scored, rewards, values, mask, lengths, config=config)
    gamma = config.advantage.gamma
    if config.advantage.estimator in ("return_to_go", "greedy_baseline"):  # the baseline is in the score already
        return estimators.returns_to_go(rewards, mask, lengths, gamma=gamma), None
    groups = group_numbers(scored)
    if config.advantage.estimator == "group_return_to_go":
        return estimators.group_returns_to_go(rewards, groups, counts, mask, lengths, gamma=gamma), None
    # Each response's return (score and KL penalty) beside those of the same prompt, the same for all its tokens.
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
    """Advantages and returns, each with its own decay where two are given (VAPO, arXiv:2504.05118)."""
    keeps_value = config.truncation_value == "bootstrap"
    bootstrap = torch.tensor([keeps_value and s.response.finish is Finish.LENGTH for s in scored])
    advantage = config.advantage

    def with_lam(lam: float | Tensor) -> tuple[Tensor, Tensor]:
        return estimators.gae(rewards, values, mask, lengths, bootstrap=bootstrap, gamma=advantage.gamma, lam=lam)

    lam: float | Tensor = advantage.gae_lambda
    if advantage.length_adaptive is not None:
        # The tokens that the estimator walks over: what a tool wrote is no part of the response's length.
        num_tokens = segment_sum(mask.to(rewards.dtype), lengths)
        lam = estimators.length_adaptive_lam(num_tokens, alpha=advantage.length_adaptive)
    advantages, returns = with_lam(lam)
    return advantages, returns if advantage.value_gae_lambda is None else with_lam(advantage.value_gae_lambda)[1]
