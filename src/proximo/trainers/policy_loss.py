"""The policy loss as it is configured: which objective, which weights, which mean. Not the passes of the model."""

from dataclasses import replace

import torch
from torch import Tensor

from proximo.algorithms import objectives
from proximo.algorithms.kl import bounded_exp
from proximo.algorithms.masking import sum_of_response_means, sum_per_token
from proximo.algorithms.objectives import TokenLosses
from proximo.config.ppo import PPOConfig
from proximo.config.ppo_losses import PolicyLossConfig
from proximo.metrics.values import Mean, MetricValue
from proximo.records import Experience
from proximo.trainers.microbatch import Microbatch


def policy_columns(experience: Experience, config: PolicyLossConfig) -> dict[str, Tensor]:
    """Name -> [T]: what the loss reads of each token."""
    columns = {"old_logprobs": experience.old_logprobs, "advantages": experience.advantages}
    if experience.reference_logprobs is not None:
        columns["reference_logprobs"] = experience.reference_logprobs
    if config.behaviour_weight != "none":
        columns["sampled_logprobs"] = _sampled_logprobs(experience)
    return columns


def token_losses(logprobs: Tensor, batch: Microbatch, config: PolicyLossConfig) -> TokenLosses:
    """The configured objective at each token; `logprobs` [T] are 0 outside the mask."""
    found = _objective(logprobs, batch, config)
    if config.behaviour_weight == "none":
        return found
    weigh = objectives.truncated_weights if config.behaviour_weight == "truncated" else objectives.masked_weights
    weights = weigh(batch.columns["old_logprobs"], batch.columns["sampled_logprobs"], cap=config.behaviour_cap)
    return replace(found, loss=weights * found.loss)


def average(per_token: Tensor, batch: Microbatch, config: PPOConfig) -> Tensor:
    """The scalar whose sum over the micro-batches is the loss of the update: denominators are those of all of it."""
    options = config.policy_loss
    if options.average == "responses":
        lengths = batch.packed.response_lengths
        return sum_of_response_means(per_token, batch.mask, lengths, denominator=batch.num_update_responses)
    if options.average == "constant":
        num_tokens = options.average_constant or config.rollout.max_new_tokens
        return sum_per_token(per_token, batch.mask, denominator=batch.num_update_responses * num_tokens)
    return sum_per_token(per_token, batch.mask, denominator=batch.num_update_tokens)


def behaviour_metrics(experience: Experience, config: PolicyLossConfig) -> dict[str, MetricValue]:
    """How far the sampler was from the policy of the step's start; nothing where that is not weighed."""
    if config.behaviour_weight == "none":
        return {}
    mask = experience.mask
    weights = bounded_exp(experience.old_logprobs[mask] - _sampled_logprobs(experience)[mask]).double()
    return {
        "policy/behaviour_weight": Mean(weights.sum().item(), len(weights)),
        "policy/behaviour_beyond_cap": Mean((weights > config.behaviour_cap).sum().item(), len(weights)),
    }


def _objective(logprobs: Tensor, batch: Microbatch, config: PolicyLossConfig) -> TokenLosses:
    given = logprobs, batch.columns["old_logprobs"], batch.columns["advantages"]
    clip_low, clip_high = config.clips
    if config.objective == "sapo":
        return objectives.sapo(*given, gate_positive=config.gate_positive, gate_negative=config.gate_negative)
    if config.objective == "m2po":
        return objectives.m2po(*given, batch.columns["trusted"])
    if config.objective == "cispo":
        return objectives.cispo(*given, clip_low=clip_low, clip_high=clip_high)
    bounds = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": config.dual_clip}
    if config.objective == "gspo":
        return objectives.gspo(*given, batch.mask, batch.packed.response_lengths, **bounds)
    return objectives.ppo(*given, **bounds)


def _sampled_logprobs(experience: Experience) -> Tensor:
    """[T] as the engine recorded them; the old ones are the policy's own."""
    return torch.cat([scored.response.logprobs for scored in experience.scored])
