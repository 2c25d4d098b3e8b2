"""The calls of a PPO step that train: epochs of minibatches over one experience. Not the optimizer step itself."""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import TypeVar

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
from proximo.learner.own_optimizer import OwnOptimizer
from proximo.learner.update import Learner, UpdateResult
from proximo.metrics.values import Mean, MetricValue, Sum
from proximo.models.cpu.thread_split import check_neighbour, is_watched, use_all_threads
from proximo.models.heads import token_logprobs
from proximo.models.quantised import is_quantised
from proximo.ppo.counted import nothing_to_learn, token_values
from proximo.ppo.roles.inference import InferenceCalls
from proximo.ppo.update.joint_loss import JointStatistics, joint_loss, policy_parts, policy_share, value_share
from proximo.ppo.update.micro_batching import cut_minibatch, plan_updates
from proximo.ppo.update.microbatch import Microbatch
from proximo.ppo.update.overlap import BOTH_UPDATES, trains_side_by_side, updates_beside
from proximo.ppo.update.policy_loss import (
    aggregate,
    behaviour_metrics,
    mark_trusted,
    policy_columns,
    token_losses,
    without_rejected,
)
from proximo.ppo.update.ptx import JointUpdates, TextLoss
from proximo.ppo.update.reports import AT_REST, Report, Taken, policy_metrics, scale_metrics, update_metrics
from proximo.records import Experience

Statistics = TypeVar("Statistics")


class UpdateCalls:
    """Handlers of the calls that train: the policy and, where there is one, the value model."""

    def __init__(
        self,
        inference: InferenceCalls,
        *,
        policy: Learner,
        value: Learner | None,
        seed: int,
        check_first: Callable[[PolicyStatistics, Experience, int], None] | None = None,
        texts: TextLoss | None = None,
    ) -> None:
        """`check_first` sees the statistics of each step's first minibatch before anything is learned from it, with the
        step's experience and its number from 0.

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

    @property
    def calls_side_by_side(self) -> tuple[str, ...]:
        """Calls that may run at the same time as things are now; none where somebody looks on."""
        models = [self.roles.policy, *([] if self.roles.value is None else [self.roles.value])]
        learners = [self.policy_learner, *([] if self.value_learner is None else [self.value_learner])]
        allowed = trains_side_by_side(
            self.config,
            device=self.roles.policy.device.type,
            shares_trunk=self.roles.shares_trunk,
            compiled=any(model.backbone.is_compiled for model in models),
            quantised=any(is_quantised(model.base) for model in models),
            own_optimizers=any(isinstance(learner.options, OwnOptimizer) for learner in learners),
        )
        return BOTH_UPDATES if allowed and not is_watched() else ()

    def train_policy(self, experience: Experience, *, kl_coefficient: float, step: int) -> Report:
        """Policy updates over all epochs, or until `target_kl` ends them; the KL joins the loss if placed there.

        No update where no response tells the policy anything, or all of them are rejected; in a flat step the metrics
        say that nothing moved, in others they are left out.
        """
        learned = without_rejected(experience, self.config.policy_loss)
        if nothing_to_learn(experience, self.config) or (experience.mask.any() and not learned.mask.any()):
            return self._no_update(experience)

        def loss(batch: Microbatch) -> tuple[Tensor, PolicyStatistics]:
            return self._policy_loss(self._hidden(batch), batch, kl_coefficient)

        columns, learner = policy_columns(experience, self.config.policy_loss), self._with_texts()
        guard = self._guard_of(experience, step)
        taken = self._take(learner, learned, columns, loss, step=step, guard=guard, ends=self._ends)
        return self._policy_report(taken, learner, experience, step)

    def train_value(self, experience: Experience, *, step: int) -> Report:
        """Regression of the values on the returns, over all epochs; where they are normalised, in those units.

        The returns move the units first, before the value model learns from them. On a shared trunk the head alone
        learns: this is the critic's warm-up.
        """
        value, learner = self.roles.value, self.value_learner
        if value is None or learner is None:
            raise ValueError("this run has no critic that learns by itself")

        def loss(batch: Microbatch) -> tuple[Tensor, ValueStatistics]:
            with torch.set_grad_enabled(not self.roles.shares_trunk):
                hidden = value.backbone.packed(batch.packed.packed, rows=batch.packed.predictors)
            return self._value_loss(value.scores(hidden), batch)

        taken = self._take(learner, experience, self._value_columns(experience), loss, step=step)
        self._stop_if_too_many_skipped(taken.results, "value", step)
        metrics = update_metrics("value", taken, taken.num_tokens) | self._value_metrics(taken)
        return Report(metrics=metrics, refusals=tuple(result.refusal for result in taken.results if result.refusal))

    def train_policy_and_value(
        self, experience: Experience, *, kl_coefficient: float, step: int
    ) -> tuple[Report, Report]:
        """Both on a shared trunk: one pass, one loss and one optimizer step for each minibatch, guarded as the policy.

        The second report tells what is the value head's alone; gradient, rate and skips of both are in the first.
        """
        value, coefficient = self.roles.value, self.config.value_loss.weight
        guard = self._guard_of(experience, step)
        learner = self._with_texts()
        if value is None or not self.roles.shares_trunk:
            raise ValueError("the value model of this run is not on the policy's trunk")

        def loss(batch: Microbatch) -> tuple[Tensor, JointStatistics]:
            hidden = self._hidden(batch)
            policy_part = self._policy_loss(hidden, batch, kl_coefficient)
            return joint_loss(policy_part, self._value_loss(value.scores(hidden), batch), coefficient=coefficient)

        learned = without_rejected(experience, self.config.policy_loss)
        if experience.mask.any() and not learned.mask.any():
            return self._no_update(experience), Report(metrics={}, refusals=())
        taken = self._take(
            learner,
            learned,
            policy_columns(experience, self.config.policy_loss) | self._value_columns(experience),
            loss,
            step=step,
            guard=lambda parts: guard(policy_parts(parts)),
            ends=lambda parts: self._ends(policy_parts(parts)),
        )
        of_policy, of_value = policy_share(taken), value_share(taken)
        value_loss = {"value/loss": update_metrics("value", of_value, taken.num_tokens)["value/loss"]}
        return (
            self._policy_report(of_policy, learner, experience, step),
            Report(metrics=value_loss | self._value_metrics(of_value), refusals=()),
        )

    def _no_update(self, experience: Experience) -> Report:
        metrics = behaviour_metrics(experience, self.config.policy_loss)
        return Report(metrics=metrics | (AT_REST if experience.is_flat else {}), refusals=(), share_trained=0.0)

    def _with_texts(self) -> Learner | JointUpdates:
        """What takes this step's updates of the policy."""
        return self.policy_learner if self.texts is None else JointUpdates(self.policy_learner, self.texts)

    def _hidden(self, batch: Microbatch) -> Tensor:
        """[T, D]: what the policy knew before each response token."""
        return self.roles.policy.hidden_states(batch.packed.packed, batch.packed.predictors)

    def _policy_loss(self, hidden: Tensor, batch: Microbatch, kl_coefficient: float) -> tuple[Tensor, PolicyStatistics]:
        config, options = self.config, self.config.policy_loss
        policy, bonus = self.roles.policy, options.entropy_coefficient
        temperature = config.rollout.temperature
        found = token_logprobs(hidden, policy.head, batch.packed.targets, temperature=temperature, entropy=bonus > 0)
        (clean,) = select(batch.mask, found.logprobs)
        result = token_losses(clean, batch, options)
        per_token = result.loss
        if config.kl.apply_to == "loss":
            divergence = kl.clamped(self._kl_in_loss(clean, hidden, batch), config.kl.clamp)
            per_token = per_token + kl_coefficient * divergence
        if found.entropy is not None:
            per_token = per_token - bonus * select(batch.mask, found.entropy)[0]
        old = batch.columns["old_logprobs"]
        statistics = policy_statistics(found.logprobs, old, result.clipped, batch.mask)
        return aggregate(per_token, batch, config), statistics

    def _value_loss(self, values: Tensor, batch: Microbatch) -> tuple[Tensor, ValueStatistics]:
        options, old, returns = self.config.value_loss, batch.columns["values"], batch.columns["returns"]
        (clean,) = select(batch.mask, values)
        per_token = clipped_value_loss(clean, old, returns, clip=options.clip, huber_delta=options.delta)
        statistics = value_statistics(values, old, returns, batch.mask, clip=options.clip)
        return sum_per_token(per_token, batch.mask, denominator=batch.num_update_tokens), statistics

    def _value_columns(self, experience: Experience) -> dict[str, Tensor]:
        """What the values say and should say, after the returns of the step have moved their units."""
        if experience.returns is None:
            raise ValueError("this experience was made without a critic")
        scale = self.inference.value_scale
        values, returns = scale.follow(token_values(experience), experience.returns, experience.mask)
        return {"values": values, "returns": returns}

    def _value_metrics(self, taken: Taken[ValueStatistics]) -> dict[str, MetricValue]:
        totals = reduce(add, (part for result in taken.results for part in result.statistics))
        clipped = Mean(totals.clipped.item(), totals.num_tokens.item())
        return {"value/clip_fraction": clipped} | scale_metrics(self.inference.value_scale)

    def _policy_report(
        self, taken: Taken[PolicyStatistics], learner: Learner | JointUpdates, experience: Experience, step: int
    ) -> Report:
        options = self.config.policy_loss
        self._stop_if_too_many_skipped(taken.whole, "policy", step)
        totals = reduce(add, (part for result in taken.results for part in result.statistics))
        weights = taken.num_tokens if options.aggregation == "token_mean" else taken.num_responses
        metrics = policy_metrics(totals) | update_metrics("policy", taken, weights)
        if isinstance(learner, JointUpdates):
            metrics |= learner.metrics
        if self.config.guards.target_kl is not None:
            metrics["policy/stopped_updates"] = Sum(taken.num_planned - len(taken.whole))
        return Report(
            metrics=metrics | behaviour_metrics(experience, options),
            refusals=tuple(result.refusal for result in taken.results if result.refusal),
            first_minibatch=reduce(add, taken.results[0].statistics),
            share_trained=len(taken.results) / taken.num_planned,
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
    ) -> "Taken[Statistics]":
        """The updates of a plan, one after the other; a refused one after which the step `ends` is the last."""
        # Tokens outside the mask may hold anything, NaN included: nothing of them enters a loss.
        clean = {name: torch.where(experience.mask, column, 0.0) for name, column in columns.items()}
        plan = plan_updates(experience, self.config, seed=self.seed, step=step)
        taken: Taken[Statistics] = Taken(num_planned=len(plan))
        budget = self.config.tokens_per_microbatch
        own, other = self.roles.policy, self.roles.value
        if learner is self.value_learner and other is not None:
            own, other = other, own
        beside = updates_beside(len(plan), own, other, experience)
        with learner.training():
            for number, members in enumerate(plan):
                check_neighbour()
                if number == beside:
                    use_all_threads()
                batches = cut_minibatch(experience, clean, members, token_budget=budget, device=own.device)
                if learner is not self.value_learner:
                    batches = mark_trusted(batches, self.roles.policy, self.config)
                result = learner.update(batches, loss, guard=guard)
                taken.results.append(result)
                taken.num_tokens.append(batches[0].num_update_tokens)
                taken.num_responses.append(batches[0].num_update_responses)
                if result.refusal is not None and ends(result.statistics):
                    taken.ended = True
                    break
        return taken

    def _kl_in_loss(self, logprobs: Tensor, hidden: Tensor, batch: Microbatch) -> Tensor:
        if self.config.kl.estimator == "full":
            return self.inference.full_kl(hidden, batch.packed)
        reference = batch.columns["reference_logprobs"]
        if self.config.kl.estimator == "weighted_k3":
            return kl.weighted_k3(logprobs, batch.columns["old_logprobs"], reference)
        return kl.k2(logprobs, reference)

    def _guard_of(self, experience: Experience, step: int) -> Callable[[Sequence[PolicyStatistics]], str | None]:
        """The guard of a step's updates. At the first it may stop the run, while nothing was learned yet."""
        unseen = True

        def guard(parts: Sequence[PolicyStatistics]) -> str | None:
            nonlocal unseen
            if unseen and self.check_first is not None:
                self.check_first(reduce(add, parts), experience, step)
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


def _divergence(parts: Sequence[PolicyStatistics]) -> float:
    """k3 per token."""
    total = reduce(add, parts)
    return (total.k3 / total.num_tokens).item()
