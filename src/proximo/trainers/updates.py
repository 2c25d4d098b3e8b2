"""The calls of a PPO step that train: epochs of minibatches over one experience. Not the optimizer step itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Generic, TypeVar

import torch
from torch import Tensor

from proximo.algorithms import kl
from proximo.algorithms.losses import (
    PolicyStatistics,
    ValueStatistics,
    clipped_value_loss,
    policy_statistics,
    value_statistics,
)
from proximo.algorithms.masking import select, sum_per_token
from proximo.errors import TrainingError
from proximo.learner.minibatches import plan_minibatches
from proximo.learner.update import Learner, UpdateResult
from proximo.metrics.values import Last, Mean, MetricValue, Sum
from proximo.models.batching import plan_batches
from proximo.models.heads import token_logprobs
from proximo.records import Experience
from proximo.trainers.calls import InferenceCalls, pack_members
from proximo.trainers.experience import token_values
from proximo.trainers.microbatch import Microbatch
from proximo.trainers.policy_loss import average, behaviour_metrics, policy_columns, token_losses
from proximo.trainers.ptx import JointUpdates, TextLoss
from proximo.trainers.second_moment import mark_trusted
from proximo.trainers.value_scale import scale_metrics

Statistics = TypeVar("Statistics")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What the updates of one step did to one model."""

    metrics: dict[str, MetricValue]
    refusals: tuple[str, ...]
    """Why updates were skipped, one entry each; the last may be why the step's updates ended."""
    first_minibatch: PolicyStatistics | None = None
    share_trained: float = 1.0
    """Of the updates that were planned, those whose gradient was computed; below 1 where target_kl ended them."""


class UpdateCalls:
    """Handlers of the calls that train: the policy and, where there is one, the value model."""

    def __init__(
        self,
        inference: InferenceCalls,
        *,
        policy: Learner,
        value: Learner | None,
        seed: int,
        check_first: Callable[[PolicyStatistics, int], None] | None = None,
        texts: TextLoss | None = None,
    ) -> None:
        """`check_first` sees the first minibatch of each step, counted from 0, before anything is learned from it.

        `texts` join every update of the policy.
        """
        self.inference = inference
        self.check_first = check_first
        self.roles = inference.roles
        self.config = inference.config
        self.policy_learner = policy
        self.value_learner = value
        self.seed = seed
        self.texts = texts

    def train_policy(self, experience: Experience, *, kl_coefficient: float, step: int) -> Report:
        """Policy updates over all epochs, or until `target_kl` ends them; the KL joins the loss if placed there."""
        config, options = self.config, self.config.policy_loss

        def loss(batch: Microbatch) -> tuple[Tensor, PolicyStatistics]:
            policy, bonus = self.roles.policy, options.entropy_coefficient
            hidden = policy.hidden_states(batch.packed.packed)[batch.packed.predictors]
            temperature = config.rollout.temperature
            found = token_logprobs(
                hidden, policy.head, batch.packed.targets, temperature=temperature, entropy=bonus > 0
            )
            (clean,) = select(batch.mask, found.logprobs)
            result = token_losses(clean, batch, options)
            per_token = result.loss
            if config.kl.place == "loss":
                per_token = per_token + kl_coefficient * self._kl_in_loss(clean, hidden, batch)
            if found.entropy is not None:
                per_token = per_token - bonus * select(batch.mask, found.entropy)[0]
            old = batch.columns["old_logprobs"]
            statistics = policy_statistics(found.logprobs, old, result.clipped, batch.mask)
            return average(per_token, batch, config), statistics

        columns = policy_columns(experience, options)
        learner = self.policy_learner if self.texts is None else JointUpdates(self.policy_learner, self.texts)
        taken = self._take(learner, experience, columns, loss, step=step, guard=self._guard_of(step), ends=self._ends)
        self._stop_if_too_many_skipped(taken.whole, "policy", step)
        totals = reduce(add, (part for result in taken.results for part in result.statistics))
        weights = taken.num_tokens if options.average == "tokens" else taken.num_responses
        metrics = _policy_metrics(totals) | _update_metrics("policy", taken, weights)
        if isinstance(learner, JointUpdates):
            metrics |= learner.metrics
        if config.guards.target_kl is not None:
            metrics["policy/stopped_updates"] = Sum(taken.num_planned - len(taken.whole))
        return Report(
            metrics=metrics | behaviour_metrics(experience, options),
            refusals=tuple(result.refusal for result in taken.results if result.refusal),
            first_minibatch=reduce(add, taken.results[0].statistics),
            share_trained=len(taken.results) / taken.num_planned,
        )

    def train_value(self, experience: Experience, *, step: int) -> Report:
        """Regression of the values on the returns, over all epochs; where they are normalised, in those units.

        The returns move the units first, before the value model learns from them.
        """
        value, learner, options = self.roles.value, self.value_learner, self.config.value_loss
        if experience.returns is None or value is None or learner is None:
            raise ValueError("this run has no critic")

        def loss(batch: Microbatch) -> tuple[Tensor, ValueStatistics]:
            values = value.token_scores(batch.packed.packed)[batch.packed.predictors]
            old, returns = batch.columns["values"], batch.columns["returns"]
            (clean,) = select(batch.mask, values)
            per_token = clipped_value_loss(clean, old, returns, clip=options.clip, huber_delta=options.delta)
            statistics = value_statistics(values, old, returns, batch.mask, clip=options.clip)
            return sum_per_token(per_token, batch.mask, denominator=batch.num_update_tokens), statistics

        scale = self.inference.value_scale
        values, returns = scale.follow(token_values(experience), experience.returns, experience.mask)
        taken = self._take(learner, experience, {"values": values, "returns": returns}, loss, step=step)
        self._stop_if_too_many_skipped(taken.results, "value", step)
        totals = reduce(add, (part for result in taken.results for part in result.statistics))
        return Report(
            metrics={"value/clip_fraction": Mean(totals.clipped.item(), totals.num_tokens.item())}
            | _update_metrics("value", taken, taken.num_tokens)
            | scale_metrics(scale),
            refusals=tuple(result.refusal for result in taken.results if result.refusal),
        )

    def _take(
        self,
        learner: Learner | JointUpdates,
        experience: Experience,
        columns: dict[str, Tensor],
        loss: Callable[[Microbatch], tuple[Tensor, Statistics]],
        *,
        step: int,
        guard: Callable[[Sequence[Statistics]], str | None] = lambda _: None,
        ends: Callable[[Sequence[Statistics]], bool] = lambda _: False,
    ) -> "_Taken[Statistics]":
        """The updates of a plan, one after the other; a refused one after which the step `ends` is the last."""
        # Tokens outside the mask may hold anything, NaN included: nothing of them enters a loss.
        clean = {name: torch.where(experience.mask, column, 0.0) for name, column in columns.items()}
        plan = self._plan(experience, step=step)
        taken: _Taken[Statistics] = _Taken(num_planned=len(plan))
        for members in plan:
            batches = self._cut(experience, clean, members)
            if learner is self.policy_learner:
                batches = mark_trusted(batches, self.roles.policy, self.config)
            result = learner.update(batches, loss, guard=guard)
            taken.results.append(result)
            taken.num_tokens.append(batches[0].num_update_tokens)
            taken.num_responses.append(batches[0].num_update_responses)
            if result.refusal is not None and ends(result.statistics):
                taken.ended = True
                break
        return taken

    def _plan(self, experience: Experience, *, step: int) -> list[list[int]]:
        """The responses of each minibatch, epoch after epoch."""
        parts = experience.mask.split(list(experience.lengths))
        members = [index for index, part in enumerate(parts) if part.any()]
        if not members:
            raise TrainingError(
                f"step {step + 1}: no response has a token that counts; all {len(parts)} were empty, cut off under "
                "truncated: mask, or could not be scored"
            )
        epochs = plan_minibatches(
            members,
            size=self.config.responses_per_update,
            num_epochs=self.config.epochs_per_step,
            seed=self.seed,
            step=step,
        )
        return [minibatch for epoch in epochs for minibatch in epoch]

    def _cut(self, experience: Experience, columns: dict[str, Tensor], minibatch: Sequence[int]) -> list[Microbatch]:
        """The micro-batches of a minibatch, each of whole responses."""
        responses = [scored.response for scored in experience.scored]
        sizes, device = list(experience.lengths), self.roles.policy.device
        pieces = {name: column.split(sizes) for name, column in columns.items()}
        masks = experience.mask.split(sizes)
        lengths = [len(responses[i].prompt.token_ids) + sizes[i] for i in minibatch]
        plan = plan_batches(lengths, token_budget=self.config.tokens_per_microbatch)
        chosen = [[minibatch[i] for i in indices] for indices in plan]
        num_update_tokens = sum(int(masks[i].sum()) for i in minibatch)
        return [
            Microbatch(
                packed=pack_members(responses, members, device=device),
                mask=torch.cat([masks[i] for i in members]).to(device),
                columns={name: torch.cat([parts[i] for i in members]).to(device) for name, parts in pieces.items()},
                num_update_tokens=num_update_tokens,
                num_update_responses=len(minibatch),
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

    def _guard_of(self, step: int) -> Callable[[Sequence[PolicyStatistics]], str | None]:
        """The guard of a step's updates. At the first it may stop the run, while nothing was learned yet."""
        unseen = True

        def guard(parts: Sequence[PolicyStatistics]) -> str | None:
            nonlocal unseen
            if unseen and self.check_first is not None:
                self.check_first(reduce(add, parts), step)
            unseen = False
            return self._guard(parts)

        return guard

    def _guard(self, parts: Sequence[PolicyStatistics]) -> str | None:
        total, config = reduce(add, parts), self.config.guards
        ratio, divergence = (total.ratio / total.num_tokens).item(), _divergence(parts)
        moved = f"the KL from the step's start is {divergence:.3g} per token, above"
        if config.target_kl is not None and divergence > config.target_kl:
            return f"{moved} target_kl = {config.target_kl:g}: the updates of this step end here"
        if config.max_ratio is not None and ratio > config.max_ratio:
            return f"the mean ratio is {ratio:.3g}, above max_ratio = {config.max_ratio:g}"
        if config.max_kl is not None and divergence > config.max_kl:
            return f"{moved} max_kl = {config.max_kl:g}"
        return None

    def _ends(self, parts: Sequence[PolicyStatistics]) -> bool:
        """k3, which is never negative, unlike the mean of the log-ratios; and before the update, not after it."""
        target = self.config.guards.target_kl
        return target is not None and _divergence(parts) > target

    def _stop_if_too_many_skipped(self, results: Sequence[UpdateResult], role: str, step: int) -> None:
        skipped = [result.refusal for result in results if result.refusal]
        limit = self.config.guards.max_skipped_fraction
        if len(skipped) > limit * len(results):
            raise TrainingError(
                f"step {step + 1}: {len(skipped)} of {len(results)} updates of the {role} were skipped, more than "
                f"max_skipped_fraction = {limit:g} allows; the last reason: {skipped[-1]}"
            )


@dataclass(kw_only=True, slots=True)
class _Taken(Generic[Statistics]):
    """The updates of one step: those that were tried, with the counts of their minibatches."""

    num_planned: int
    results: list[UpdateResult[Statistics]] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_responses: list[int] = field(default_factory=list)
    ended: bool = False
    """The last result is the update that was not taken because the step ended before it."""

    @property
    def whole(self) -> list[UpdateResult[Statistics]]:
        """Those that were taken or skipped one by one."""
        return self.results[:-1] if self.ended else self.results


def _divergence(parts: Sequence[PolicyStatistics]) -> float:
    """k3 per token."""
    total = reduce(add, parts)
    return (total.k3 / total.num_tokens).item()


def _policy_metrics(total: PolicyStatistics) -> dict[str, MetricValue]:
    count = total.num_tokens.item()
    return {
        "policy/clip_fraction": Mean(total.clipped.item(), count),
        "policy/ratio_mean": Mean(total.ratio.item(), count),
        "policy/approx_kl": Mean(total.k3.item(), count),
    }


def _update_metrics(role: str, taken: _Taken, weights: Sequence[int]) -> dict[str, MetricValue]:
    """`weights`: how many of what each loss is the mean over."""
    applied = [(r, weight) for r, weight in zip(taken.results, weights, strict=True) if r.refusal is None]
    return {
        f"{role}/loss": Mean(sum(r.loss * weight for r, weight in applied), sum(weight for _, weight in applied)),
        f"{role}/gradient_norm": Mean.of(r.gradient_norm for r, _ in applied),
        f"{role}/learning_rate": Last((taken.whole or taken.results)[-1].learning_rate),
        f"{role}/skipped_updates": Sum(len(taken.whole) - len(applied)),
    }
