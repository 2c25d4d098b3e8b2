"""The configured losses of an update: of the policy, of pairs of responses, of the critic, and of both on one trunk."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from proximo.algorithms import kl
from proximo.algorithms.behaviour import (
    behaviour_ratios,
    bounded_weights,
    near_the_sampler,
    within_ratio_bounds,
)
from proximo.algorithms.losses import (
    PolicyStatistics,
    ValueStatistics,
    clipped_value_loss,
    policy_statistics,
    value_statistics,
)
from proximo.algorithms.masking import segment_sum, select, sum_of_response_means, sum_per_token
from proximo.algorithms.objectives import TokenLosses, within_second_moment
from proximo.algorithms.preferences import implicit_rewards
from proximo.config.ppo.losses import (
    BehaviourWeightConfig,
    ConstantDivisorConfig,
    DivergenceRejectionConfig,
    MaskedWeightConfig,
    PolicyLossConfig,
    RatioRejectionConfig,
    ResponseMeanConfig,
    TokenMeanConfig,
    TruncatedWeightConfig,
    ValueLossConfig,
)
from proximo.config.ppo.objectives import ObjectiveConfig
from proximo.config.ppo.options import PPOConfig
from proximo.config.ppo.rewards import LossKLConfig
from proximo.distributed.world import current
from proximo.learner.update import UpdateResult
from proximo.metrics.values import Mean, MetricValue
from proximo.models.heads import Divergence
from proximo.models.language import LanguageModel
from proximo.ppo.update.epochs import Microbatch, UpdateLog
from proximo.records import Experience


def policy_loss(
    policy: LanguageModel,
    hidden: Tensor,
    batch: Microbatch,
    config: PPOConfig,
    *,
    kl_coefficient: float,
    divergence: Callable[[], Divergence],
) -> tuple[Tensor, PolicyStatistics]:
    """The policy loss of a micro-batch, a scalar, with statistics. Micro-batches add up to the loss of the update.

    `hidden`: [T, D] states before each response token. `divergence`: compares policy and reference over the vocabulary
    at each of them, for the full KL.
    """
    options, temperature = config.policy_loss, config.rollout.temperature
    bonus = options.entropy_coefficient
    tokens = policy.logprobs_from(hidden, batch.packed, temperature=temperature, entropy=bonus > 0)
    (clean,) = select(batch.mask, tokens.logprobs)
    if options.objective.is_pairwise:
        loss, sums = pair_loss(clean, batch, formula=options.objective.formula, beta=kl_coefficient)
        nowhere = torch.zeros_like(batch.mask)
        statistics = policy_statistics(tokens.logprobs, batch.columns["old_logprobs"], nowhere, batch.mask)
        return loss, replace(statistics, others=sums)
    result = token_losses(clean, batch, options)
    per_token = result.loss
    sums = {}
    if isinstance(config.kl, LossKLConfig) and config.kl.estimator == "full":
        full = divergence()
        sums = {"full_kl": full.kl.detach()[batch.mask].sum(), "same_top": full.same_top[batch.mask].sum()}
        per_token = per_token + kl_coefficient * kl.clamped(full.kl, config.kl.clamp)
    elif isinstance(config.kl, LossKLConfig):
        per_token = per_token + kl_coefficient * kl.clamped(_sampled_kl(clean, batch, config.kl), config.kl.clamp)
    if tokens.entropy is not None:
        per_token = per_token - bonus * select(batch.mask, tokens.entropy)[0]
    statistics = policy_statistics(tokens.logprobs, batch.columns["old_logprobs"], result.clipped, batch.mask)
    return aggregate(per_token, batch, config), replace(statistics, others=sums)


def _sampled_kl(logprobs: Tensor, batch: Microbatch, config: LossKLConfig) -> Tensor:
    reference = batch.columns["reference_logprobs"]
    if config.estimator == "weighted_k3":
        return kl.weighted_k3(logprobs, batch.columns["old_logprobs"], reference)
    return kl.k2(logprobs, reference)


def policy_columns(experience: Experience, config: PolicyLossConfig) -> dict[str, Tensor]:
    """Name -> [T] inputs of the policy loss."""
    columns = {"old_logprobs": experience.old_logprobs, "advantages": experience.advantages}
    if experience.reference_logprobs is not None:
        columns["reference_logprobs"] = experience.reference_logprobs
    if config.behaviour_weight is not None:
        columns["behaviour_weights"] = _behaviour_weights(experience, config.behaviour_weight)
    if config.rejection is not None and config.rejection.denominator == "all":
        weights = columns.get("behaviour_weights", torch.ones_like(experience.old_logprobs))
        columns["behaviour_weights"] = torch.where(_kept(experience, config), weights, 0)
    return columns


def learned_part(experience: Experience, config: PolicyLossConfig) -> Experience:
    """The experience with what the loss is a mean over in its mask.

    Rejected tokens are not in it, unless the denominator is that of all; nor are pairs of equal scores, under a loss
    over pairs.
    """
    if config.objective.is_pairwise:
        return replace(experience, mask=experience.mask & (experience.advantages != 0))
    if config.rejection is None or config.rejection.denominator == "all":
        return experience
    return replace(experience, mask=_kept(experience, config))


def _kept(experience: Experience, config: PolicyLossConfig) -> Tensor:
    """[T] bool: the tokens of the mask that are not rejected."""
    given = experience.old_logprobs, _sampled_logprobs(experience), experience.mask, experience.lengths
    match config.rejection:
        case RatioRejectionConfig() as bounds:
            return within_ratio_bounds(*given, over=bounds.over, lower=bounds.lower, upper=bounds.upper)
        case DivergenceRejectionConfig() as bound:
            return near_the_sampler(*given, estimator=bound.estimator, over=bound.over, limit=bound.limit)
    return experience.mask


def token_losses(logprobs: Tensor, batch: Microbatch, config: PolicyLossConfig) -> TokenLosses:
    """The configured objective at each token. `logprobs`: [T], 0 outside the mask."""
    losses = _objective(logprobs, batch, config.objective)
    weights = batch.columns.get("behaviour_weights")
    return losses if weights is None else replace(losses, loss=weights * losses.loss)


def aggregate(per_token: Tensor, batch: Microbatch, config: PPOConfig) -> Tensor:
    """Aggregate token losses to a scalar.

    Denominators are those of the whole update, so micro-batches add up to its loss.
    """
    match config.policy_loss.aggregation:
        case ResponseMeanConfig():
            lengths = batch.packed.response_lengths
            return sum_of_response_means(per_token, batch.mask, lengths, denominator=batch.num_update_responses)
        case ConstantDivisorConfig() as constant:
            num_tokens = constant.divisor or config.rollout.max_new_tokens
            return sum_per_token(per_token, batch.mask, denominator=batch.num_update_responses * num_tokens)
        case TokenMeanConfig():
            return sum_per_token(per_token, batch.mask, denominator=batch.num_update_tokens)


def behaviour_metrics(experience: Experience, config: PolicyLossConfig) -> dict[str, MetricValue]:
    """Metrics of behaviour weights and rejection over all tokens in the mask; empty if neither is configured."""
    mask, metrics = experience.mask, dict[str, MetricValue]()
    if (bounds := config.behaviour_weight) is not None:
        weights = _behaviour_ratios(experience, bounds)[mask].double()
        beyond = (weights > bounds.highest) | (weights < bounds.floor)
        metrics["policy/behaviour_weight"] = Mean(weights.sum().item(), len(weights))
        metrics["policy/behaviour_clip_fraction"] = Mean(beyond.sum().item(), len(weights))
        if bounds.floor > 0:
            below = int((weights < bounds.floor).sum())
            metrics["policy/behaviour_below_fraction"] = Mean(below, len(weights))
    if config.rejection is not None:
        metrics["policy/rejected_fraction"] = _rejected(experience, config)
    if isinstance(config.rejection, RatioRejectionConfig) and config.rejection.lower > 0:
        without_upper = config.rejection.model_copy(update={"upper": math.inf})
        below = _rejected(experience, config.model_copy(update={"rejection": without_upper}))
        metrics["policy/rejected_below_fraction"] = below
    return metrics


def _rejected(experience: Experience, config: PolicyLossConfig) -> Mean:
    kept, counted = int(_kept(experience, config).sum()), int(experience.mask.sum())
    return Mean(counted - kept, counted)


def _objective(logprobs: Tensor, batch: Microbatch, objective: ObjectiveConfig) -> TokenLosses:
    """What the objective's formula gives for log-probs, old log-probs and advantages, with what else it reads."""
    columns = batch.columns
    given: list[Any] = [logprobs, columns["old_logprobs"], columns["advantages"]]
    if objective.reads_responses:
        given += [batch.mask, batch.packed.response_lengths]
    if objective.second_moment_limit is not None:
        given.append(columns["kept_tokens"])
    return objective.formula(*given, **objective.options)


def _behaviour_ratios(experience: Experience, config: BehaviourWeightConfig) -> Tensor:
    old, sampled = experience.old_logprobs, _sampled_logprobs(experience)
    return behaviour_ratios(old, sampled, experience.mask, experience.lengths, of=config.of)


def _behaviour_weights(experience: Experience, config: TruncatedWeightConfig | MaskedWeightConfig) -> Tensor:
    ratios = _behaviour_ratios(experience, config)
    return bounded_weights(ratios, floor=config.floor, cap=config.highest, masked=config.is_masked)


def _sampled_logprobs(experience: Experience) -> Tensor:
    """[T] log-probs that the engine recorded while sampling, as opposed to the policy's own old log-probs.

    Where it recorded none that is finite, the policy's own.
    """
    sampled = torch.cat([scored.response.logprobs for scored in experience.scored])
    return torch.where(sampled.isfinite(), sampled, experience.old_logprobs)


@torch.no_grad()
def leave_tokens_out(batches: Sequence[Microbatch], policy: LanguageModel, config: PPOConfig) -> list[Microbatch]:
    """Add which tokens an objective with a `second_moment_limit` keeps, as a column `kept_tokens` of 1 and 0.

    Returns the micro-batches of a minibatch unchanged for other objectives.

    The second moment is taken over the whole minibatch under the current policy, so that the mask does not depend on
    the micro-batches, nor on the number of ranks. It costs one more forward pass per update.
    """
    limit = config.policy_loss.objective.second_moment_limit
    if limit is None:
        return list(batches)
    temperature = config.rollout.temperature

    def log_ratios_of(batch: Microbatch) -> Tensor:
        logprobs = policy.response_logprobs(batch.packed, temperature=temperature).logprobs
        return logprobs - batch.columns["old_logprobs"]

    log_ratios = [policy.backbone.run_pass(partial(log_ratios_of, batch)) for batch in batches]
    masks = [batch.mask for batch in batches]
    kept_tokens = _within_second_moment(torch.cat(log_ratios), torch.cat(masks), limit=limit).split(
        [len(mask) for mask in masks]
    )
    return [
        replace(batch, columns=batch.columns | {"kept_tokens": part.to(ratios)})
        for batch, part, ratios in zip(batches, kept_tokens, log_ratios, strict=True)
    ]


def _within_second_moment(log_ratios: Tensor, mask: Tensor, *, limit: float) -> Tensor:
    """`within_second_moment` over the tokens of all ranks: this rank's part of it, [T] bool."""
    world, what = current(), "the log-ratios of a minibatch"
    if world.size == 1:
        return within_second_moment(log_ratios, mask, limit=limit)
    counts = world.gather(len(mask), what=what)
    all_ratios, all_masks = (world.gather_rows(rows, what=what) for rows in (log_ratios, mask))
    return within_second_moment(all_ratios, all_masks, limit=limit).split(counts)[world.rank]


def pair_loss(
    logprobs: Tensor, batch: Microbatch, *, formula: Callable[..., Tensor], beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the mean over the update's pairs, a scalar, and the sums that the metrics need.

    `formula`: the loss of pairs from the log-ratios of the better and the worse response, [N] each, and `beta`.

    `logprobs`: [T] under the policy, 0 outside the mask. Responses 2 i and 2 i + 1 of the micro-batch are a pair; the
    one with a positive advantage is the better one.
    """
    lengths, columns = batch.packed.response_lengths, batch.columns
    log_ratios = segment_sum(torch.where(batch.mask, logprobs - columns["reference_logprobs"], 0), lengths).view(-1, 2)
    is_first = segment_sum(torch.where(batch.mask, columns["advantages"], 0), lengths).view(-1, 2)[:, 0] > 0
    first, second = log_ratios.unbind(1)
    chosen, rejected = torch.where(is_first, first, second), torch.where(is_first, second, first)
    loss = formula(chosen, rejected, beta=beta).sum() / (batch.num_update_responses / 2)
    with torch.no_grad():
        rewards = implicit_rewards(torch.stack([chosen, rejected]), beta=beta)
        gaps = rewards[0] - rewards[1]
        sums = {
            "pairs": gaps.new_tensor(len(gaps)),
            "accuracy": (gaps > 0).to(gaps.dtype).sum() + (gaps == 0).to(gaps.dtype).sum() / 2,
            "margin": gaps.sum(),
            "reward_chosen": rewards[0].sum(),
            "reward_rejected": rewards[1].sum(),
        }
    return loss, sums


def value_loss(values: Tensor, batch: Microbatch, options: ValueLossConfig) -> tuple[Tensor, ValueStatistics]:
    """The value loss of a micro-batch, a scalar, with statistics. Micro-batches add up to the loss. `values`: [T]."""
    old, returns = batch.columns["values"], batch.columns["returns"]
    (clean,) = select(batch.mask, values)
    per_token = clipped_value_loss(clean, old, returns, clip=options.clip, huber_delta=options.error.delta)
    statistics = value_statistics(values, old, returns, batch.mask, clip=options.clip)
    return sum_per_token(per_token, batch.mask, denominator=batch.num_update_tokens), statistics


@dataclass(frozen=True, kw_only=True, slots=True)
class JointStatistics:
    """Statistics of a micro-batch for both losses. The losses are the micro-batch's shares of the update's losses."""

    policy: PolicyStatistics
    value: ValueStatistics
    policy_loss: Tensor
    value_loss: Tensor
    """The value loss before it is multiplied by its coefficient."""


def joint_loss(
    policy: tuple[Tensor, PolicyStatistics], value: tuple[Tensor, ValueStatistics], *, coefficient: float
) -> tuple[Tensor, JointStatistics]:
    """policy loss + coefficient * value loss (arXiv:1707.06347, eq. 9), a scalar, with the statistics of both."""
    (policy_loss, moved), (value_loss, errors) = policy, value
    statistics = JointStatistics(
        policy=moved, value=errors, policy_loss=policy_loss.detach(), value_loss=value_loss.detach()
    )
    return policy_loss + coefficient * value_loss, statistics


def policy_share(taken: UpdateLog[JointStatistics]) -> UpdateLog[PolicyStatistics]:
    """The policy's part of joint updates. Gradient norms are those of the joint loss."""
    return _share(taken, lambda part: (part.policy_loss, part.policy))


def value_share(taken: UpdateLog[JointStatistics]) -> UpdateLog[ValueStatistics]:
    """The value model's part of joint updates. Gradient norms are those of the joint loss."""
    return _share(taken, lambda part: (part.value_loss, part.value))


def _share(taken: UpdateLog[JointStatistics], of: Callable[[JointStatistics], tuple[Tensor, Any]]) -> UpdateLog[Any]:
    def share(result: UpdateResult[JointStatistics]) -> UpdateResult[Any]:
        losses, statistics = zip(*(of(part) for part in result.statistics), strict=True)
        return replace(cast("UpdateResult[Any]", result), loss=sum(x.item() for x in losses), statistics=statistics)

    return replace(cast("UpdateLog[Any]", taken), results=[share(result) for result in taken.results])
