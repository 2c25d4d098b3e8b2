"""PPO as a library: train on prompts with a reward, or write your own loop and pass scores.

trainer = PPOTrainer(policy, tokenizer, config=PPOConfig(...))
responses = trainer.generate(prompts)
stats = trainer.step(prompts, responses, scores)
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from torch import Tensor

from proximo.algorithms.controllers import KLController
from proximo.config.devices import DevicesConfig
from proximo.config.ppo.options import PPOConfig
from proximo.data.examples import TextExample
from proximo.data.order import rows_at
from proximo.distributed.world import current
from proximo.environments.engine import Arena
from proximo.environments.environment import Environment
from proximo.environments.prompts import given_prompts
from proximo.environments.reward import with_environment
from proximo.errors import ConfigError
from proximo.learner.optimizers import OwnOptimizer
from proximo.learner.update import Learner
from proximo.metrics.catalogue import step_line
from proximo.metrics.console import ProgressInfo, ProgressView
from proximo.metrics.console import open_progress as open_view
from proximo.metrics.values import Last, MetricValue
from proximo.models.language import LanguageModel
from proximo.models.precision.placement import Precision
from proximo.models.scalar import ScalarModel
from proximo.ppo.calls import Calls, OwnCall, check_own_calls
from proximo.ppo.make_roles import make_roles, step_digest
from proximo.ppo.roles.worker import ServedReferenceWorker
from proximo.ppo.step import possible_calls, ppo_step
from proximo.ppo.step_arguments import Mask, PromptLike, ResponseLike, Score, as_prompts, as_responses, as_scored
from proximo.ppo.step_metrics import StepAhead, StepOutcome, step_metrics
from proximo.ppo.train_state import TrainState, controlled_coefficient
from proximo.ppo.trainer_arguments import (
    as_policy,
    as_reference,
    as_seed,
    as_source,
    as_value,
    check_config,
    check_engine,
    check_environment,
    check_learning,
    check_models,
    check_rows,
    check_tokenizer,
    check_training,
    earns,
)
from proximo.records import Experience, Prompt, Response, Scored
from proximo.rewards.source import RewardSource, scored_once, statistics_of
from proximo.rewards.weighted import Reward
from proximo.rollout.asynchronous import PromptsOfStep
from proximo.rollout.engine import Engine
from proximo.rollout.engine import statistics_of as engine_statistics
from proximo.rollout.responses import Responses
from proximo.run.make.environments import PythonAgent, PythonEnvironment, as_played
from proximo.run.memory import check_release
from proximo.trainer_kinds import TrainerKind, recipe_kind

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompts = Sequence[PromptLike | Mapping[str, Any]] | int
"""Prompts to answer; with an environment, rows, or a number of episodes."""


class PPOTrainer:
    """Runs PPO steps on the workers of the roles (`roles`). State that belongs to no role is in `state`.

    Args:
        policy: the model to train, in place.
        tokenizer: the policy's tokenizer.
        reference: the reference of the KL. None makes a copy of the policy, or uses its base under LoRA.
        value: the critic. None starts one from a copy of the policy's backbone with a new head; "trunk" puts the head
            on the policy's own backbone (as does a `scalar_on(policy)` of models/sharing.py).
        reward: source or function that scores in `train`; `step` takes scores. `NoReward()` learns from `reference`.
        ptx: texts for the language-modelling loss of `config.ptx`.
        config: the options of PPO; None for the defaults.
        seed: seed of all sampling and shuffling.
        engine: samples from the policy, and gets its weights when they change. None makes the built-in engine, which
            uses the policy's own tensors.
        own_calls: functions of yours at the calls of every step (docs/dataflow.md).
        environment: a class with `reset` and `step`, a function that makes one, or a `PythonEnvironment`: the policy
            plays episodes, and what it earns there is added to `reward` (docs/environments.md).
        optimizers: custom optimizers for "policy" and "value", which replace those of the configuration.
        devices: how the models lie on several ranks (docs/scale.md). Nothing on one.
        kl_controller: controls the KL coefficient instead of `config.kl`. After each step that trains the policy, it
            gets the KL of each counted response.

    Raises:
        ModelError: a model cannot be packed, has bfloat16 or float16 weights, or the vocabularies differ.
        ConfigError: ptx without config.ptx, or the reverse; an own call, optimizer or KL controller that does not
            fit.
    """

    calls_type: type[Calls] = Calls
    """Runs the calls of a step. A subclass of `Calls` may run them in another way, or watch them."""

    def __init__(  # noqa: PLR0913 - every part of the trainer can be replaced
        self,
        policy: "LanguageModel | PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        reference: "LanguageModel | PreTrainedModel | ServedReferenceWorker | None" = None,
        value: "ScalarModel | PreTrainedModel | Literal['trunk'] | None" = None,
        reward: Reward | None = None,
        ptx: Sequence[TextExample | str] | None = None,
        config: PPOConfig | None = None,
        seed: int = 0,
        engine: Engine | None = None,
        environment: "Callable[[], Environment] | PythonEnvironment | PythonAgent | Arena | None" = None,
        own_calls: Sequence[OwnCall] = (),
        optimizers: Mapping[str, OwnOptimizer] | None = None,
        kl_controller: KLController | None = None,
        devices: DevicesConfig | None = None,
    ) -> None:
        check_config(config)
        check_tokenizer(tokenizer)
        check_engine(engine)
        self.config = config or PPOConfig()
        self.seed = as_seed(seed)
        self.tokenizer = tokenizer
        self.policy = as_policy(policy)
        reference, value = as_reference(reference, self.policy), as_value(value)
        moves, played = self.config.kl.reference_every_steps is not None, as_played(environment)
        check_models(self.policy, tokenizer, reference=reference, value=value, moves=moves, played=played)
        self.environments = played if played is None or isinstance(played, Arena) else played.arena(tokenizer)
        check_release(self.config.release_cache, current().device or self.policy.device)
        self.roles = make_roles(
            self.policy,
            tokenizer,
            reference=reference,
            value=value,
            config=self.config,
            seed=self.seed,
            reward=self._source(reward),
            engine=engine,
            environments=self.environments,
            texts=ptx,
            optimizers=optimizers,
            devices=devices,
        )
        check_own_calls(own_calls, possible_calls(self.config, shares_trunk=self.roles.shares_trunk))
        self.own_calls = tuple(own_calls)
        self.kl_controller = kl_controller
        kl = self.config.kl
        coefficient = kl.coefficient if kl_controller is None else controlled_coefficient(kl, kl_controller)
        self.state = TrainState(kl_coefficient=coefficient)

    def __repr__(self) -> str:
        roles = ", ".join(worker.role for worker in self.roles.workers)
        return f"PPOTrainer(step {self.state.steps_done} of {self.config.num_steps}, {roles})"

    @property
    def learners(self) -> dict[str, Learner]:
        """Role -> learner of every trained model."""
        return {role: learner for worker in self.roles.workers for role, learner in worker.learners.items()}

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps that the policy has taken."""
        return self.roles.policy.version

    @property
    def reuses_sampled_logprobs(self) -> bool:
        """Whether the sampler's log-probs serve as old log-probs, so that no pass is needed to recompute them.

        False if the engine or the policy rounds more than float32, if earlier weights may have sampled, and if
        behaviour weights or rejection compare the two, since responses may then come from any sampler.
        """
        compared = self.config.needs_sampled_logprobs
        exact = self.policy.precision is Precision.FLOAT32 and self.roles.policy.engine.logprobs_are_the_learners
        return exact and not (self.config.rollout.staleness or compared or self.config.rollout.reshapes_distribution)

    def generate(self, prompts: Prompts) -> list[Response]:
        """Sample responses to each prompt as the next step would, `samples_per_prompt` or else `responses_per_prompt`.

        A prompt is a text, its token ids (a list or a tensor without padding) or a Prompt. With an environment it is a
        row, that is a mapping; or there is a number of episodes in place of all rows.
        """
        return Responses(self.roles.policy.sample(self._prompts(prompts), self.state))

    def _source(self, reward: Reward | None) -> RewardSource | None:
        """The reward as a source, with that of the environment. Raises ConfigError if they do not go together."""
        if self.environments is not None:
            reward = with_environment(reward, per_turn=self.config.advantage.is_per_token)
            check_environment(reward, self.config)
        return as_source(reward, task=self.config.task_reward)

    def _prompts(self, prompts: Prompts) -> list[Prompt]:
        given: Any = prompts
        if self.environments is not None:
            return given_prompts(given)
        return as_prompts(self.tokenizer, given, num_tokens=self.policy.vocab_size)

    def step(
        self,
        prompts: Sequence[PromptLike],
        responses: Sequence[ResponseLike],
        scores: Sequence[Score] | Tensor,
        *,
        response_masks: Sequence[Mask] | None = None,
    ) -> dict[str, float]:
        """Train on responses that you scored yourself, and return the step's metrics.

        Args:
            prompts: as for `generate`, one per response or one per group of responses.
            responses: from `generate`, or token ids (lists or tensors, without prompt and padding). For token ids the
                policy computes the log-probs.
            scores: one per response, or one reward per token, whose sum is the score. None or a non-finite number
                leaves the response out of the step. On several ranks those of rank 0 count.
            response_masks: for each response True (or 1) for tokens of the policy. Other tokens, such as tool output,
                are context only: they have no part in loss, KL and advantages.

        Raises DataError if the numbers of these do not match, and TrainingError after a step that a guard ends.
        """
        records = self._adopt(prompts, responses, response_masks)
        scored = scored_once(lambda: as_scored(records, scores), records, name="step")
        return self._line(self.run_step(scored=scored))

    def train(
        self,
        prompts: Prompts,
        *,
        reward: Reward | None = None,
        on_step: Callable[[int, Mapping[str, float]], Any] | None = None,
        quiet: bool = False,
    ) -> list[dict[str, float]]:
        """Run the remaining steps over the prompts, in the order of each epoch, and return the metrics of every step.

        `reward` is a source, a function (`FunctionReward`), or a list of them; None keeps the trainer's.
        `on_step(number, metrics)` is called after each step, on rank 0; an exception in it ends the training on every
        rank. A notebook shows the progress, unless `quiet`. Raises ConfigError if no step is left, for functions with
        the wrong signature, and for `NoReward` without another model as reference, or with options that need scores;
        DataError for prompts that the reward cannot score.
        """
        if reward is not None:
            self.roles.reward.source = self._source(reward)
        check_learning(self.roles.reward.source, self.config, has_teacher=self.roles.has_teacher)
        known = self._prompts(prompts)
        scored = any(own.is_instead_of("score") for own in self.own_calls)
        scored = scored or earns(self.roles.reward.source, self.environments)
        check_training(known, self.config, scored=scored, on_step=on_step, steps_done=self.state.steps_done)
        check_rows(self.roles.reward.source, known)
        prompts_of = self.in_order(known)
        history: list[dict[str, float]] = []
        first, total = self.state.steps_done, self.config.num_steps
        with closing(self), closing(open_progress(first_step=first, total_steps=total, quiet=quiet)) as progress:
            while self.state.steps_done < total:
                history.append(self._line(self.run_step(prompts_of=prompts_of)))
                progress.write(self.state.steps_done, history[-1])
                if on_step is not None:
                    _call_on_step(on_step, self.state.steps_done, history[-1])
        return history

    def in_order(self, prompts: Sequence[Prompt]) -> PromptsOfStep:
        """The prompts of each step, in the order of each epoch."""
        size = self.config.prompts_per_step

        def prompts_of(step: int) -> list[Prompt]:
            return [prompts[row] for row in rows_at(step * size, size, num_rows=len(prompts), seed=self.seed)]

        return prompts_of

    def close(self) -> None:
        """End the sampling ahead of a run with `rollout.staleness`, which must not go on afterwards."""
        self.roles.policy.close()

    def run_step(
        self,
        *,
        prompts: Sequence[Prompt] | None = None,
        prompts_of: PromptsOfStep | None = None,
        scored: Sequence[Scored] | None = None,
    ) -> StepOutcome:
        """Run one step from its prompts, from those of all steps, or from scored responses.

        Raises GuardError, with nothing changed, where a guard ends the run before the updates (one that ends it after
        them is the `guard` of the outcome), and TrainingError if log-probs differ in the first one or memory ran out.
        """
        if scored is None and prompts_of is None and self.config.resamples:
            raise ConfigError(
                "ppo.advantage.zero_variance_groups: resample samples further prompts, which only `train` knows: use it"
            )
        self.roles.policy.prompts_of = prompts_of
        call = self.calls_type(
            step=self.state.steps_done + 1,
            memory_settings=self.config.memory_settings,
            models=self.roles.group,
            own=self.own_calls,
        )
        outcome, after = ppo_step(
            call,
            self.roles,
            self.state,
            self.config,
            prompts_of=prompts_of or (lambda _: prompts or ()),
            given=scored,
            reuses_sampled_logprobs=self.reuses_sampled_logprobs,
            kl_controller=self.kl_controller,
        )
        call.forget_values()
        ahead = self._ahead(outcome.experience) if scored is None else None
        if (world := current()).size > 1:
            digest = step_digest(outcome.experience, after, self.roles)
            world.agree(digest, what=f"the records and weights of step {after.steps_done}")
        self.state = after
        return replace(outcome, ahead=ahead)

    def _ahead(self, experience: Experience) -> StepAhead | None:
        ahead = self.roles.policy.ahead
        if ahead is None or ahead.taken is None:
            return None
        responses = [scored.response for scored in experience.scored]
        return StepAhead(rollouts=ahead.taken, steps_behind=ahead.steps_behind(responses, step=self.state.steps_done))

    def metrics(self, outcome: StepOutcome) -> dict[str, MetricValue]:
        """The declared metrics of the step that was just taken."""
        own: dict[str, MetricValue] = {
            "progress/updates": Last(self.policy_version),
            "progress/prompts": Last(self.state.rollouts_done * self.config.prompts_per_step),
            **self.roles.policy.sampler_guard.metrics(self.policy_version),
        }
        metrics = step_metrics(outcome, self.config, precision=self.policy.precision) | own
        return metrics | engine_statistics(self.roles.policy.engine) | statistics_of(self.roles.reward.source)

    def _line(self, outcome: StepOutcome) -> dict[str, float]:
        outcome.check_guard()
        return step_line(self.metrics(outcome))[0]

    def _adopt(
        self, prompts: Sequence[PromptLike], responses: Sequence[ResponseLike], masks: Sequence[Mask] | None
    ) -> list[Response]:
        """Responses as records. Those that are token ids get log-probs of the policy."""
        records = as_responses(
            self.tokenizer,
            self._prompts(prompts),
            responses,
            policy=self.policy,
            policy_version=self.policy_version,
            others_allowed=self.config.needs_sampled_logprobs,
            masks=masks,
        )
        return self.roles.policy.with_logprobs(records)


def open_progress(*, first_step: int, total_steps: int, quiet: bool) -> ProgressView:
    """A live view in a notebook. Elsewhere `train` shows nothing."""
    console, kind = Console(stderr=True), recipe_kind("ppo")
    assert isinstance(kind, TrainerKind)
    info = ProgressInfo(trainer=kind, total_steps=total_steps, first_step=first_step)
    return open_view(info, console=console, quiet=quiet or not console.is_jupyter)


def _call_on_step(
    on_step: Callable[[int, Mapping[str, float]], Any], number: int, metrics: Mapping[str, float]
) -> None:
    """Call `on_step` on rank 0. Its exceptions may be meant to end the loop, so they are raised on every rank, with a
    note of their origin."""

    def run() -> BaseException | None:
        try:
            on_step(number, metrics)
        except BaseException as error:
            error.add_note(
                f"raised by on_step. Training stops. Step {number} is complete; call train again to go on with step "
                f"{number + 1}."
            )
            if not _can_be_sent(error):
                raise
            return error
        return None

    error = current().on_rank_0(run, what="on_step")
    if error is not None:
        raise error


def _can_be_sent(error: BaseException) -> bool:
    try:
        pickle.dumps(error)
    except Exception:  # a user's exception may hold anything
        return False
    return True
