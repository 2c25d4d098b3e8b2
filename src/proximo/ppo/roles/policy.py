"""The policy of a PPO run: sampling through its engine, log-probs, and updates."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from proximo.algorithms.losses import PolicyStatistics
from proximo.algorithms.masking import value_positions
from proximo.checkpoint.ranks import RankWriter, Writer
from proximo.checkpoint.reading import Checkpoint
from proximo.config.ppo.options import PPOConfig
from proximo.errors import ConfigError
from proximo.learner.update import Learner
from proximo.metrics.values import MetricValue, Sum
from proximo.models.heads import Divergence
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses
from proximo.ppo.experience import counted_mask
from proximo.ppo.roles.sampler import NO_MASK, NUM_CANARIES, RolloutsAhead, SamplerGuard, check_engine
from proximo.ppo.roles.value import ValueWorker
from proximo.ppo.roles.worker import LogprobsAndValues, ReferenceWorker, RoleWorker, logprobs_of, over_batches
from proximo.ppo.train_state import TrainState
from proximo.ppo.update.epochs import (
    AT_REST,
    Epochs,
    Microbatch,
    Report,
    TrunkReports,
    UpdateLog,
    policy_metrics,
    update_metrics,
)
from proximo.ppo.update.guards import PolicyGuard, check_first_minibatch, likely_causes, too_many_skipped
from proximo.ppo.update.losses import (
    JointStatistics,
    behaviour_metrics,
    joint_loss,
    learned_part,
    leave_tokens_out,
    policy_columns,
    policy_loss,
    policy_share,
    value_share,
)
from proximo.ppo.update.ptx import JointUpdates, TextLoss
from proximo.records import Experience, Prompt, Response
from proximo.rollout.asynchronous import PromptsOfStep
from proximo.rollout.engine import Engine, push_to, sampling_with
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.run.memory import release_cache

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

Statistics = TypeVar("Statistics")


class PolicyWorker(RoleWorker[LanguageModel]):
    """The worker of the policy: the trained model and the engine that samples from it."""

    role = "policy"
    learner: Learner

    def __init__(
        self,
        model: LanguageModel,
        learner: Learner,
        config: PPOConfig,
        *,
        engine: Engine,
        seed: int,
        texts: TextLoss | None = None,
        ahead: RolloutsAhead | None = None,
        on_finished: Callable[[], Callable[[Response], None] | None] = lambda: None,
        check_first: bool = True,
    ) -> None:
        """Args beyond those of a worker.

        `texts`: PTX texts for every update. `ahead`: samples for later steps while this one trains; None samples before
        each step.
        `on_finished`: gives, at each rollout, the callback for responses that are complete, if there is one.
        `check_first`: check the first minibatch of each step against the limits of update/guards.py.
        """
        super().__init__(model, learner)
        self.config = config
        self.engine = engine
        self.seed = seed
        self.texts = texts
        self.epochs = Epochs(
            model,
            config,
            seed=seed,
            prepare=lambda batches: leave_tokens_out(batches, model, config),
        )
        self.ahead = ahead
        self.prompts_of: PromptsOfStep | None = None
        """The prompts of all steps, which sampling ahead needs."""
        self.on_finished = on_finished
        self.check_first = check_first
        self.sampler_guard = SamplerGuard(config.guards.max_mismatch, ahead)
        self._canaries: list[Prompt] = []

    @property
    def version(self) -> int:
        """Number of updates that the policy has taken."""
        return self.learner.updates_done

    def push_weights(self) -> None:
        """Send the current weights to the engine.

        Raises TrainingError if it does not hold them afterwards, or does not sample with them.
        """
        if self.ahead is not None:
            self.sampler_guard.measure(self.logprobs, version=self.version)
            self.ahead.before_push()
            self.ahead.push(self.model, version=self.version)
        if push_to(self.engine, self.model, version=self.version) and self._canaries:
            options = sampling_options(self.config)
            check_engine(self.engine, self._canaries, self.logprobs, options, seed=self.seed, version=self.version)

    def generate(self, prompts: Sequence[Prompt], state: TrainState) -> list[Response]:
        """Sample the responses of a step, or wait for them if they are sampled ahead."""
        if self.ahead is None:
            return self.sample(prompts, state)
        if self.prompts_of is None:
            raise ConfigError(
                "ppo.rollout.staleness samples the prompts of later steps, which only `train` knows: use it"
            )
        self._keep_canaries(prompts)
        self.push_weights()
        begin = {"version": self.version, "on_finished": self.on_finished()}
        return self._sampled(self.ahead.responses(state.steps_done, self.prompts_of, **begin))

    def sample(self, prompts: Sequence[Prompt], state: TrainState) -> list[Response]:
        """Sample the configured number of responses to each prompt."""
        self._keep_canaries(prompts)
        with sampling_with(self.engine, self.model):
            self.push_weights()
            responses = self.engine.generate(
                prompts,
                num_samples=self.config.sampled_per_prompt,
                options=sampling_options(self.config),
                key=rollout_key(self.seed, state.rollouts_done),
                on_finished=self.on_finished(),
            )
        return self._sampled(responses)

    def _sampled(self, responses: list[Response]) -> list[Response]:
        self._keep_canaries([response.prompt for response in responses])
        drawn = [response for response in responses if response.response_mask.any()]
        if sampling_options(self.config).leaves_out_tokens and any(each.sampling_mask is None for each in drawn):
            warnings.warn(NO_MASK, stacklevel=2)
        return responses

    def _keep_canaries(self, prompts: Sequence[Prompt]) -> None:
        """Keep the first prompts with tokens, which those of episodes have after their first observation."""
        self._canaries = self._canaries or [prompt for prompt in prompts if prompt.token_ids][:NUM_CANARIES]

    def generate_greedy(self, prompts: Sequence[Prompt], state: TrainState) -> list[Response]:
        """The greedy response to each prompt."""
        options = sampling_options(self.config, greedy=True)
        with sampling_with(self.engine, self.model):
            self.push_weights()
            key = rollout_key(self.seed, state.rollouts_done)
            return self.engine.generate(prompts, num_samples=1, options=options, key=key)

    def release_cache(self) -> None:
        """Return the memory of the rollout's cache to the device before the updates."""
        release_cache(self.model.device)

    def close(self) -> None:
        """End the sampling ahead."""
        if self.ahead is not None:
            self.ahead.close()

    def writers(self, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Writer | RankWriter]:
        """See `RoleWorker.writers`; with the responses that were sampled ahead."""
        ahead: dict[str, Writer | RankWriter] = {} if self.ahead is None else {"rollouts": self.ahead.write}
        return super().writers(tokenizer) | ahead

    def state(self) -> dict[str, Any]:
        """What the file of responses that were sampled ahead holds."""
        return {} if self.ahead is None else {"rollouts": self.ahead.state()}

    def restore(self, checkpoint: Checkpoint) -> None:
        """As `RoleWorker.restore`, and the responses that were sampled ahead."""
        super().restore(checkpoint)
        if self.ahead is not None:
            self.ahead.restore(checkpoint.state["task"]["rollouts"], checkpoint.path("rollouts"))

    def logprobs(self, responses: Sequence[Response]) -> Tensor:
        """[T] log-probs of the response tokens under the current policy."""
        return logprobs_of(self.model, responses, self.config)

    def with_logprobs(self, responses: Sequence[Response]) -> list[Response]:
        """The responses with log-probs. If any response lacks them, the policy computes them for all."""
        if all(len(response.logprobs) == len(response.token_ids) for response in responses):
            return list(responses)
        pieces = self.logprobs(responses).split([len(response.token_ids) for response in responses])
        return [replace(response, logprobs=piece) for response, piece in zip(responses, pieces, strict=True)]

    def old_logprobs(self, responses: Sequence[Response]) -> Tensor:
        """[T] log-probs before the step's updates. Raises GuardError if the sampler's are too far from them."""
        logprobs = self.logprobs(responses)
        self.sampler_guard.check(responses, logprobs, version=self.version)
        return logprobs

    def logprobs_and_values(self, responses: Sequence[Response], value: ValueWorker) -> LogprobsAndValues:
        """[T] log-probs as `old_logprobs`, and [T + R] values, from one pass through the shared trunk."""
        temperature = self.config.rollout.temperature

        def run(batch: PackedResponses) -> Tensor:
            """[N + S, 2]: log-prob of the next token (0 after the last one) and value, for N tokens of S responses."""
            hidden = self.model.hidden_states(batch.packed)
            tokens = self.model.logprobs_from(hidden[batch.predictors], batch, temperature=temperature)
            logprobs = tokens.logprobs.new_zeros(len(batch.value_positions))
            logprobs[value_positions(batch.response_lengths, device=logprobs.device)] = tokens.logprobs
            return torch.stack([logprobs, value.model.scores(hidden[batch.value_positions])], dim=-1)

        both = over_batches(responses, run, self.model, self.config, extra=1)
        before_tokens = value_positions([len(response.token_ids) for response in responses])
        logprobs = both[before_tokens, 0]
        self.sampler_guard.check(responses, logprobs, version=self.version)
        return LogprobsAndValues(logprobs, value.scale.values(both[:, 1]))

    def train(self, experience: Experience, state: TrainState, reference: ReferenceWorker | None = None) -> Report:
        """Train the policy for all epochs, or until `target_kl` ends the step.

        Takes no update if no response has a learning signal or all tokens are rejected. If the returns hardly differ,
        the metrics report that nothing moved; otherwise they are left out. `reference`: needed for a full KL in the
        loss.
        """
        learned = learned_part(experience, self.config.policy_loss)
        if _has_nothing_to_learn(experience, self.config) or _has_none_left(learned, experience):
            return self._no_update(experience)

        def loss(batch: Microbatch) -> tuple[Tensor, PolicyStatistics]:
            return self._loss(self._hidden(batch), batch, state, reference)

        guard, updates = self._guard(experience, state, lambda part: part), self._updates()
        columns = policy_columns(experience, self.config.policy_loss)
        with nullcontext() if reference is None else reference.model.backbone.at_work():
            taken = self.epochs.take(updates, learned, columns, loss, step=state.steps_done, guard=guard)
        return self._report(taken, updates, experience, state)

    def train_with_value(
        self,
        experience: Experience,
        state: TrainState,
        value: ValueWorker,
        reference: ReferenceWorker | None = None,
    ) -> TrunkReports:
        """Train policy and value head on a shared trunk, with one pass, loss and optimizer step per minibatch.

        The policy's guards apply. The first report also has gradient norm, learning rate and skips of both; the second
        has only the metrics of the value head.
        """
        learned = learned_part(experience, self.config.policy_loss)
        if _has_none_left(learned, experience):
            return TrunkReports(self._no_update(experience), Report(metrics={}, refusals=()))

        def loss(batch: Microbatch) -> tuple[Tensor, JointStatistics]:
            hidden = self._hidden(batch)
            policy_part = self._loss(hidden, batch, state, reference)
            return joint_loss(policy_part, value.loss(hidden, batch), coefficient=self.config.value_loss.weight)

        guard, updates = self._guard(experience, state, lambda part: part.policy), self._updates()
        columns = policy_columns(experience, self.config.policy_loss) | value.columns(experience)
        with nullcontext() if reference is None else reference.model.backbone.at_work():
            taken = self.epochs.take(updates, learned, columns, loss, step=state.steps_done, guard=guard)
        of_policy, of_value = policy_share(taken), value_share(taken)
        value_loss = {"value/loss": update_metrics("value", of_value, taken.num_tokens)["value/loss"]}
        return TrunkReports(
            self._report(of_policy, updates, experience, state),
            Report(metrics=value_loss | value.metrics(of_value), refusals=()),
        )

    def _hidden(self, batch: Microbatch) -> Tensor:
        """[T, D] hidden states before each response token."""
        return self.model.hidden_states(batch.packed.packed, batch.packed.predictors)

    def _loss(
        self, hidden: Tensor, batch: Microbatch, state: TrainState, reference: ReferenceWorker | None
    ) -> tuple[Tensor, PolicyStatistics]:
        def divergence() -> Divergence:
            assert reference is not None, "a full KL in the loss needs the reference"
            return reference.divergence(self.model, hidden, batch.packed)

        coefficient = state.kl_coefficient
        return policy_loss(self.model, hidden, batch, self.config, kl_coefficient=coefficient, divergence=divergence)

    def _guard(
        self, experience: Experience, state: TrainState, of_policy: Callable[[Statistics], PolicyStatistics]
    ) -> PolicyGuard[Statistics]:
        def check(statistics: PolicyStatistics) -> None:
            if self.check_first:
                limits = {"precision": self.model.precision, "objective": self.config.policy_loss.objective}
                causes = likely_causes(experience, policy_version=self.version)
                check_first_minibatch(statistics, **limits, causes=causes, step=state.steps_done + 1)

        return PolicyGuard(self.config.guards, of_policy, check)

    def _updates(self) -> Learner | JointUpdates:
        """The learner of this step's updates, with PTX texts if there are any."""
        return self.learner if self.texts is None else JointUpdates(self.learner, self.texts)

    def _no_update(self, experience: Experience) -> Report:
        metrics = behaviour_metrics(experience, self.config.policy_loss)
        return Report(metrics=metrics | (AT_REST if experience.is_flat else {}), refusals=(), share_trained=0.0)

    def _report(
        self,
        taken: UpdateLog[PolicyStatistics],
        updates: Learner | JointUpdates,
        experience: Experience,
        state: TrainState,
    ) -> Report:
        options = self.config.policy_loss
        self.sampler_guard.trained(experience)
        totals = reduce(add, (part for result in taken.results for part in result.statistics))
        by_token = options.aggregation.weighs_tokens and not options.objective.is_pairwise
        weights = taken.num_tokens if by_token else taken.num_responses
        metrics: dict[str, MetricValue] = policy_metrics(totals) | update_metrics(self.role, taken, weights)
        if isinstance(updates, JointUpdates):
            metrics |= updates.metrics
        if self.config.guards.target_kl is not None:
            metrics["policy/stopped_updates"] = Sum(taken.num_planned - len(taken.whole))
        return Report(
            metrics=metrics | behaviour_metrics(experience, options),
            refusals=taken.refusals,
            guard=too_many_skipped(taken.whole, self.config, role=self.role, step=state.steps_done),
            first_minibatch=reduce(add, taken.results[0].statistics),
            share_trained=len(taken.results) / taken.num_planned,
        )


def _has_nothing_to_learn(experience: Experience, config: PPOConfig) -> bool:
    """Whether no response has a learning signal: returns hardly differ, or all groups have zero variance.

    An update would still change the weights, by the optimizer's momentum and by other terms of the loss: AdamW scales
    even a small persistent gradient to a full-size step.
    """
    excludes = config.advantage.excludes_zero_variance
    nothing = excludes and not bool(experience.mask.any()) and bool(counted_mask(experience.scored, config).any())
    return experience.is_flat or nothing


def _has_none_left(learned: Experience, experience: Experience) -> bool:
    """Whether a non-empty mask has no token left to train on: all are rejected, or all pairs have equal scores."""
    return bool(experience.mask.any()) and not learned.mask.any()


def sampled_logprobs(responses: Sequence[Response]) -> Tensor:
    """[T] log-probs that the engine recorded when it sampled."""
    return torch.cat([response.logprobs for response in responses])


def rollout_key(seed: int, number: int) -> RandomKey:
    """The key of the responses of a rollout, counted from 0: that of a step, unless steps sample again."""
    return RandomKey(seed=seed, purpose="rollout", step=number)


def sampling_options(config: PPOConfig, *, greedy: bool = False) -> SamplingOptions:
    """The sampling options of a configuration."""
    rollout = config.rollout
    return SamplingOptions(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_new_tokens=rollout.min_new_tokens,
        max_new_tokens=rollout.max_new_tokens,
        random_limit_min=rollout.random_limit_min,
        stop_token_ids=rollout.stop_token_ids,
        stop_strings=rollout.stop_strings,
        greedy=greedy or rollout.greedy,
    )
