"""The calls of a PPO step that train: epochs of minibatches over one experience. Not the optimizer step itself."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from proximo.algorithms import kl
from proximo.algorithms.losses import (
    PolicyStatistics,
    ValueStatistics,
    clipped_policy_loss,
    clipped_value_loss,
    policy_statistics,
    value_statistics,
)
from proximo.algorithms.masking import select, sum_per_token
from proximo.errors import TrainingError
from proximo.learner.minibatches import plan_minibatches
from proximo.learner.update import Learner, UpdateResult
from proximo.metrics.values import Last, Max, Mean, MetricValue, Sum
from proximo.models.batching import plan_batches
from proximo.models.heads import token_logprobs
from proximo.models.packing import PackedResponses
from proximo.records import Experience
from proximo.trainers.calls import InferenceCalls, pack_members
from proximo.trainers.experience import token_values
from proximo.trainers.value_scale import ValueScale


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Some responses of a minibatch with everything a loss reads; T counts their response tokens."""

    packed: PackedResponses
    mask: Tensor
    """[T]"""
    columns: dict[str, Tensor]
    """Name -> [T], in the order of the packed targets."""
    num_update_tokens: int
    """Valid tokens of the whole minibatch: the denominator of the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What the updates of one step did to one model."""

    metrics: dict[str, MetricValue]
    refusals: tuple[str, ...]
    """Why updates were skipped, one entry each."""
    first_minibatch: PolicyStatistics | None = None


class UpdateCalls:
    """Handlers of the calls that train: the policy and, where there is one, the value model."""

    def __init__(self, inference: InferenceCalls, *, policy: Learner, value: Learner | None, seed: int) -> None:
        self.inference = inference
        self.roles = inference.roles
        self.config = inference.config
        self.policy_learner = policy
        self.value_learner = value
        self.seed = seed

    def train_policy(self, experience: Experience, *, kl_coefficient: float, step: int) -> Report:
        """Clipped policy updates over all epochs; the KL joins the loss where the configuration puts it there."""
        config = self.config
        clips = {"clip_low": config.policy_loss.clip_low, "clip_high": config.policy_loss.clip_high}

        def loss(batch: Microbatch) -> tuple[Tensor, PolicyStatistics]:
            temperature = config.rollout.temperature
            policy = self.roles.policy
            hidden = policy.hidden_states(batch.packed.packed)[batch.packed.predictors]
            found = token_logprobs(hidden, policy.head, batch.packed.targets, temperature=temperature)
            logprobs = found.logprobs
            old, advantages = batch.columns["old_logprobs"], batch.columns["advantages"]
            (clean,) = select(batch.mask, logprobs)
            per_token = clipped_policy_loss(clean, old, advantages, **clips)
            if config.kl.place == "loss":
                per_token = per_token + kl_coefficient * self._kl_in_loss(clean, hidden, batch)
            statistics = policy_statistics(logprobs, old, advantages, batch.mask, **clips)
            return sum_per_token(per_token, batch.mask, denominator=batch.num_update_tokens), statistics

        columns = {"old_logprobs": experience.old_logprobs, "advantages": experience.advantages}
        if experience.reference_logprobs is not None:
            columns["reference_logprobs"] = experience.reference_logprobs
        minibatches = self._minibatches(experience, columns, step=step)
        results = [self.policy_learner.update(batches, loss, guard=self._guard) for batches in minibatches]
        self._stop_if_too_many_skipped(results, "policy", step)
        totals = reduce(add, (part for result in results for part in result.statistics))
        return Report(
            metrics=_policy_metrics(totals) | _update_metrics("policy", results),
            refusals=tuple(result.refusal for result in results if result.refusal),
            first_minibatch=reduce(add, results[0].statistics),
        )

    def train_value(self, experience: Experience, *, step: int) -> Report:
        """Clipped regression of the values on the returns, over all epochs; where they are normalised, in those units.

        The returns move the units first, before the value model learns from them.
        """
        value, learner, clip = self.roles.value, self.value_learner, self.config.value_loss.clip
        if experience.returns is None or value is None or learner is None:
            raise ValueError("this run has no critic")

        def loss(batch: Microbatch) -> tuple[Tensor, ValueStatistics]:
            values = value.token_scores(batch.packed.packed)[batch.packed.predictors]
            old, returns = batch.columns["values"], batch.columns["returns"]
            (clean,) = select(batch.mask, values)
            per_token = clipped_value_loss(clean, old, returns, clip=clip)
            statistics = value_statistics(values, old, returns, batch.mask, clip=clip)
            return sum_per_token(per_token, batch.mask, denominator=batch.num_update_tokens), statistics

        scale = self.inference.value_scale
        values, returns = scale.follow(token_values(experience), experience.returns, experience.mask)
        columns = {"values": values, "returns": returns}
        results = [learner.update(batches, loss) for batches in self._minibatches(experience, columns, step=step)]
        self._stop_if_too_many_skipped(results, "value", step)
        totals = reduce(add, (part for result in results for part in result.statistics))
        return Report(
            metrics={"value/clip_fraction": Mean(totals.clipped.item(), totals.num_tokens.item())}
            | _update_metrics("value", results)
            | _scale_metrics(scale),
            refusals=tuple(result.refusal for result in results if result.refusal),
        )

    def _minibatches(
        self, experience: Experience, columns: dict[str, Tensor], *, step: int
    ) -> Iterator[list[Microbatch]]:
        """The micro-batches of each minibatch of each epoch, in the order of the plan."""
        counted = [int(part.sum()) for part in experience.mask.split(list(experience.lengths))]
        members = [index for index, count in enumerate(counted) if count]
        if not members:
            raise TrainingError(
                f"step {step + 1}: no response has a token that counts; all {len(counted)} were empty, cut off under "
                "truncated: mask, or could not be scored"
            )
        # Tokens outside the mask may hold anything, NaN included: nothing of them enters a loss.
        clean = {name: torch.where(experience.mask, column, 0.0) for name, column in columns.items()}
        plan = plan_minibatches(
            members,
            size=self.config.responses_per_update,
            num_epochs=self.config.epochs_per_step,
            seed=self.seed,
            step=step,
        )
        for minibatch in (minibatch for epoch in plan for minibatch in epoch):
            num_update_tokens = sum(counted[index] for index in minibatch)
            yield self._cut(experience, clean, minibatch, num_update_tokens)

    def _cut(
        self, experience: Experience, columns: dict[str, Tensor], minibatch: Sequence[int], num_update_tokens: int
    ) -> list[Microbatch]:
        responses = [scored.response for scored in experience.scored]
        sizes, device = list(experience.lengths), self.roles.policy.device
        pieces = {name: column.split(sizes) for name, column in columns.items()}
        masks = experience.mask.split(sizes)
        lengths = [len(responses[i].prompt.token_ids) + sizes[i] for i in minibatch]
        plan = plan_batches(lengths, token_budget=self.config.tokens_per_microbatch)
        chosen = [[minibatch[i] for i in indices] for indices in plan]
        return [
            Microbatch(
                packed=pack_members(responses, members, device=device),
                mask=torch.cat([masks[i] for i in members]).to(device),
                columns={name: torch.cat([parts[i] for i in members]).to(device) for name, parts in pieces.items()},
                num_update_tokens=num_update_tokens,
            )
            for members in chosen
        ]

    def _kl_in_loss(self, logprobs: Tensor, hidden: Tensor, batch: Microbatch) -> Tensor:
        if self.config.kl.measure == "full":
            return self.inference.full_kl(hidden, batch.packed)
        reference = batch.columns["reference_logprobs"]
        if self.config.kl.measure == "weighted_k3":
            return kl.weighted_k3(logprobs, batch.columns["old_logprobs"], reference)
        return kl.k2(logprobs, reference)

    def _guard(self, parts: Sequence[PolicyStatistics]) -> str | None:
        total, config = reduce(add, parts), self.config.guards
        ratio = (total.ratio / total.num_tokens).item()
        divergence = (total.k3 / total.num_tokens).item()
        if config.max_ratio is not None and ratio > config.max_ratio:
            return f"the mean ratio is {ratio:.3g}, above max_ratio = {config.max_ratio:g}"
        if config.max_kl is not None and divergence > config.max_kl:
            return f"the KL from the step's start is {divergence:.3g} per token, above max_kl = {config.max_kl:g}"
        return None

    def _stop_if_too_many_skipped(self, results: Sequence[UpdateResult], role: str, step: int) -> None:
        skipped = [result.refusal for result in results if result.refusal]
        limit = self.config.guards.max_skipped_fraction
        if len(skipped) > limit * len(results):
            raise TrainingError(
                f"step {step + 1}: {len(skipped)} of {len(results)} updates of the {role} were skipped, more than "
                f"max_skipped_fraction = {limit:g} allows; the last reason: {skipped[-1]}"
            )


def _policy_metrics(total: PolicyStatistics) -> dict[str, MetricValue]:
    count = total.num_tokens.item()
    return {
        "policy/clip_fraction": Mean(total.clipped.item(), count),
        "policy/ratio_mean": Mean(total.ratio.item(), count),
        "policy/approx_kl": Mean(total.k3.item(), count),
    }


def _scale_metrics(scale: ValueScale) -> dict[str, MetricValue]:
    return {"value/scale": Last(scale.units.scale), "value/offset": Last(scale.units.offset)} if scale.is_on else {}


def _update_metrics(role: str, results: Sequence[UpdateResult]) -> dict[str, MetricValue]:
    applied = [result for result in results if result.refusal is None]
    return {
        f"{role}/loss": _mean_loss(applied),
        f"{role}/gradient_norm": Mean.of(result.gradient_norm for result in applied),
        f"{role}/learning_rate": Last(results[-1].learning_rate),
        f"{role}/skipped_updates": Sum(len(results) - len(applied)),
    }


def _mean_loss(applied: Sequence[UpdateResult]) -> Mean:
    """Over the tokens of all updates: each loss is the mean over its own."""
    counts = [sum(part.num_tokens.item() for part in result.statistics) for result in applied]
    return Mean(sum(r.loss * count for r, count in zip(applied, counts, strict=True)), sum(counts))


def first_minibatch_metrics(total: PolicyStatistics) -> dict[str, MetricValue]:
    """How far the learner is from the sampler before anything was learned: numbers that should be 0."""
    count = total.num_tokens.item()
    return {
        "first_minibatch/max_abs_log_ratio": Max(total.max_abs_log_ratio.item()),
        "first_minibatch/mean_abs_log_ratio": Mean(total.abs_log_ratio.item(), count),
        "first_minibatch/clip_fraction": Mean(total.clipped.item(), count),
    }
