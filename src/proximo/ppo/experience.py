"""From scored responses and log-probs to rewards, advantages and returns. Pure: no model, no optimizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proximo.algorithms import kl
from proximo.algorithms.advantages import standardised_in_groups
from proximo.algorithms.masking import masked_mean, masked_variance, rescale, standardise
from proximo.algorithms.scores import NOTHING_SEEN, RunningMoments
from proximo.algorithms.segments import segment_ids, value_positions
from proximo.algorithms.shaping import shape_rewards
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError
from proximo.ppo.estimates import estimate_advantages, group_numbers
from proximo.ppo.flat_steps import ReturnSpread, return_spread
from proximo.ppo.groups import equal_outcomes
from proximo.ppo.shaped_scores import ShapedScores, shape_scores
from proximo.records import Experience, Finish, Scored

KL_ESTIMATES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": kl.k1,
    "k2": kl.k2,
    "k3": kl.k3,
    "abs": kl.absolute,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """What the model passes over a batch gave: the inputs of `make_experience` beside the scores."""

    old_logprobs: Tensor
    """[T] float32."""
    reference_logprobs: Tensor | None = None
    """[T] float32."""
    full_kl: Tensor | None = None
    """[T] KL over the whole vocabulary at each state; only where the configuration measures `full`."""
    values: Tensor | None = None
    """[T + R] float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawAdvantages:
    """What advantages were before they were standardised, for the metrics."""

    mean: float
    variance: float
    num_tokens: int
    spread: ReturnSpread


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

    A response that could not be scored, has no token of the policy, or is cut off under `truncated: mask` counts
    nowhere: not in the loss, not in its group's baseline, not in the standardising. Nor does a group that is left out
    because its outcomes are equal, but for the running moments of scores. `moments` are of the scores of the steps
    before, `returns_seen` of their returns; those to go on with come back with the shaped scores and the raw
    advantages. In a step without spread all advantages are 0.
    """
    lengths = tuple(len(s.response.token_ids) for s in scored)
    counted = counted_ones(scored, config)
    learned = counted
    if config.advantage.equal_groups == "exclude":
        learned = counted & ~equal_outcomes(scored, counted, config)
    mask = torch.cat([s.response.response_mask for s in scored]) & learned[segment_ids(lengths)]
    shaped = shape_scores(scored, counted, config=config, moments=moments)
    if shaped.token_rewards is not None and not config.advantage.goes_by_token:
        raise ConfigError(
            f"the reward source rewards single tokens, but advantage {config.advantage.estimator} judges a response as "
            "a whole: use gae or a return to go, or return one score for each response"
        )
    rewards = _rewards(shaped, passes, mask, lengths, config=config, kl_coefficient=kl_coefficient)
    spread = return_spread(rewards, mask, lengths, config=config, seen=returns_seen)
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


def token_values(experience: Experience) -> Tensor:
    """[T] the value before each response token, without the one after the last."""
    if experience.values is None:
        raise ValueError("this experience was made without a critic")
    return experience.values[value_positions(experience.lengths)]


def nothing_to_learn(experience: Experience, config: PPOConfig) -> bool:
    """True where no response tells the policy anything: a flat step, or one whose groups all have equal outcomes.

    An update would still move weights: by the optimizer's momentum, and by what else is in the loss, at full size,
    since AdamW makes any lasting gradient that.
    """
    excludes = config.advantage.equal_groups == "exclude"
    nothing = excludes and not bool(experience.mask.any()) and bool(counted_ones(experience.scored, config).any())
    return experience.is_flat or nothing


def counted_ones(scored: Sequence[Scored], config: PPOConfig) -> Tensor:
    """[R] bool: False for responses that count nowhere in their step."""
    return torch.tensor([counts(each, config) for each in scored], dtype=torch.bool)


def counts(scored: Scored, config: PPOConfig) -> bool:
    """False for a response that counts nowhere in its step."""
    cut = scored.response.finish is Finish.LENGTH and config.truncated == "mask"
    return scored.valid and bool(scored.response.response_mask.any()) and not cut


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
    if config.kl.place == "reward":
        penalty = kl.clamped(_kl_per_token(passes, config.kl.measure), config.kl.clamp)
    return shape_rewards(
        penalty, shaped.values, mask, lengths, kl_coefficient=kl_coefficient, token_rewards=shaped.token_rewards
    )


def _whitened(rewards: Tensor, mask: Tensor, config: PPOConfig) -> Tensor:
    # Both leave 0 outside the mask, so that nothing of them reaches an earlier token through the estimator.
    correction = int(config.advantage.unbiased_variance)
    if config.score.whiten_rewards == "zero_mean":
        return standardise(rewards, mask, correction=correction)
    return rescale(rewards, mask, correction=correction) if config.score.whiten_rewards == "keep_mean" else rewards


def _kl_per_token(passes: Passes, measure: str) -> Tensor:
    if measure == "full":
        if passes.full_kl is None:
            raise ValueError("measure full needs the KL over the vocabulary from the reference call")
        return passes.full_kl
    if passes.reference_logprobs is None:
        raise ValueError(f"measure {measure} needs reference log-probs")
    return KL_ESTIMATES[measure](passes.old_logprobs, passes.reference_logprobs)
