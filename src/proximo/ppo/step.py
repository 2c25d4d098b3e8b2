"""The step of PPO: each call of a model is a line of `ppo_step`, in its order. The formulas: docs/ppo-formulas.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from proximo.algorithms.controllers import KLController
from proximo.config.ppo.options import PPOConfig
from proximo.ppo.calls import Calls, TracedCall, TracingCalls, Unknown
from proximo.ppo.experience import StepExperience, count_responses, kl_in_reward, make_experience
from proximo.ppo.roles.policy import PolicyWorker, sampled_logprobs
from proximo.ppo.roles.value import ValueWorker
from proximo.ppo.roles.worker import AverageWorker, ReferenceWorker, RewardWorker, RoleWorker, ServedReferenceWorker
from proximo.ppo.selection import Batch, has_enough_groups, select
from proximo.ppo.step_metrics import StepOutcome
from proximo.ppo.train_state import TrainState, adapted_coefficient
from proximo.ppo.update.epochs import Report
from proximo.records import Passes, Prompt, Scored


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The workers of a run, all in one process."""

    policy: PolicyWorker
    reward: RewardWorker
    reference: ReferenceWorker | ServedReferenceWorker | None = None
    """None in a run without KL."""
    value: ValueWorker | None = None
    average: AverageWorker | None = None
    has_teacher: bool = False
    """Whether the reference is another model than the policy at its start."""

    @property
    def group(self) -> dict[str, RoleWorker | RewardWorker | ServedReferenceWorker]:
        """Name of a role -> its worker."""
        everyone = (*self.workers, self.reference, self.reward)
        return {worker.role: worker for worker in everyone if worker is not None}

    @property
    def workers(self) -> list[RoleWorker]:
        """The workers that have a model."""
        everyone = (self.policy, self.reference, self.value, self.average)
        return [worker for worker in everyone if isinstance(worker, RoleWorker)]

    @property
    def shares_trunk(self) -> bool:
        """Whether the value model is a head on the policy's layers."""
        return self.value is not None and self.value.is_on_trunk

    @property
    def evaluated(self) -> PolicyWorker | AverageWorker:
        """The worker to evaluate: the policy, or its average with `evaluate_average`."""
        return self.average if self.average is not None and self.policy.config.evaluate_average else self.policy


def ppo_step(  # noqa: C901, PLR0912, PLR0915 - the page of PPO, each call of a model in its place
    call: Calls,
    roles: Roles,
    state: TrainState,
    config: PPOConfig,
    *,
    prompts_of: Callable[[int], Sequence[Prompt]],
    given: Sequence[Scored] | None = None,
    reuses_sampled_logprobs: bool,
    kl_controller: KLController | None = None,
) -> tuple[StepOutcome, TrainState]:
    """One step of PPO, and the state after it.

    `prompts_of`: number of a rollout -> its prompts. `given`: scored responses, with which nothing is sampled.
    `reuses_sampled_logprobs`: the sampler's log-probs are those of the policy to the bit.
    """
    call.input("state", state)
    policy, value, reference, reward, average = roles.policy, roles.value, roles.reference, roles.reward, roles.average

    # 1. Sample responses and score them; further ones where groups of equal scores teach nothing.
    rollouts = [] if given is None else [call.input("scored", given)]
    for number in range(config.advantage.most_rollouts if given is None else 0):
        rollout = replace(state, extra_rollouts=state.extra_rollouts + number)
        prompts = call.input("prompts", prompts_of(rollout.rollouts_done))
        responses = call("generate", "policy", policy.generate, prompts, rollout)
        greedy = ()
        if config.advantage.needs_greedy:
            greedy = call("generate_greedy", "policy", policy.generate_greedy, prompts, rollout)
        rollouts.append(call("score", "reward", reward.score, responses, greedy, rollout))
        if not config.resamples or call("count_groups", None, partial(has_enough_groups, config=config), rollouts):
            break
    resamples = given is None and config.resamples
    batch = call("select", None, partial(select, config=config, resamples=resamples), rollouts, state)

    # 2. What the models say of the responses: log-probs before any update, and values.
    values = reference_logprobs = full_kl = None
    if reuses_sampled_logprobs:
        old_logprobs = call("sampled_logprobs", None, sampled_logprobs, batch.responses)
    elif value is not None and roles.shares_trunk:
        both = call("policy_logprobs_and_values", "policy", policy.logprobs_and_values, batch.responses, value)
        old_logprobs, values = both.logprobs, both.values
    else:
        old_logprobs = call("policy_logprobs", "policy", policy.old_logprobs, batch.responses)
    if reference is not None:
        beside = [policy] if config.kl.full_in == "reward" else []
        found = call("reference_logprobs", "reference", reference.logprobs, batch.responses, *beside)
        reference_logprobs, full_kl = found.logprobs, found.full_kl
    if value is not None and values is None:
        values = call("values", "value", value.values, batch.responses)

    # 3. Advantages and returns, from scores, KL and values.
    if config.release_cache:
        call("release_cache", "policy", policy.release_cache)
    passes = Passes(old_logprobs=old_logprobs, reference_logprobs=reference_logprobs, full_kl=full_kl, values=values)
    made = call("experience", None, partial(experience_of, config=config), batch.scored, passes, state)

    # 4. Epochs of updates; in the critic's warm-up the policy rests.
    policy_report = value_report = None
    policy_learns = state.steps_done >= config.critic_warmup_steps
    beside = [reference] if config.kl.full_in == "loss" else []
    if policy_learns and value is not None and roles.shares_trunk:
        inputs = (made.experience, state, value, *beside)
        reports = call("train_policy_and_value", "policy", policy.train_with_value, *inputs)
        policy_report, value_report = reports.policy, reports.value
    elif policy_learns:
        policy_report = call("train_policy", "policy", policy.train, made.experience, state, *beside)
    if value is not None and value_report is None:
        value_report = call("train_value", "value", value.train, made.experience, state)

    # 5. The state after the step. The engine, and the models that follow the policy, get its weights.
    end = partial(next_state, config=config, controller=kl_controller)
    after = call("next_state", None, end, state, batch, made, policy_report)
    call("push_weights", "policy", policy.push_weights)
    if average is not None:
        call("move_average", "average", average.move, policy)
    if config.kl.reference_every_steps is not None and not isinstance(reference, ServedReferenceWorker | None):
        call("follow_policy", "reference", reference.follow, after, policy)
    outcome = StepOutcome(made=made, batch=batch, policy=policy_report, value=value_report, calls=call)
    coefficient = state.kl_coefficient if config.kl.needs_reference else None
    return replace(outcome, kl_coefficient=coefficient, is_scored=given is not None or reward.is_scored), after


def experience_of(scored: Sequence[Scored], passes: Passes, state: TrainState, *, config: PPOConfig) -> StepExperience:
    """The experience of scored responses: which of them count, the KL in their rewards, and the moments of the run."""
    return make_experience(
        scored,
        count_responses(scored, config),
        passes,
        kl_in_reward(passes, config.kl),
        config=config,
        kl_coefficient=state.kl_coefficient,
        moments=state.score_moments,
        returns_seen=state.return_moments,
    )


def next_state(
    state: TrainState,
    batch: Batch,
    made: StepExperience,
    policy: Report | None,
    *,
    config: PPOConfig,
    controller: KLController | None,
) -> TrainState:
    """The state after a step. `policy`: None if the policy rested, with which the KL coefficient rests, too."""
    coefficient = state.kl_coefficient
    if policy is not None:
        coefficient = adapted_coefficient(coefficient, made.experience, config.kl, controller)
    return replace(
        state,
        kl_coefficient=coefficient,
        steps_done=state.steps_done + 1,
        extra_rollouts=state.extra_rollouts + batch.num_rollouts - 1,
        score_moments=made.shaped_scores.moments,
        return_moments=made.raw_advantages.spread.seen,
        constant_reward_steps=state.constant_reward_steps.after(batch.sampled, task_reward=config.task_reward),
    )


def trace_step(
    config: PPOConfig, *, reuses_sampled_logprobs: bool, shares_trunk: bool = False, steps_done: int | None = None
) -> list[TracedCall]:
    """The calls that a step of this configuration makes, found by running the page without any model.

    `steps_done`: None for a step after the critic's warm-up.
    """
    steps_done = config.critic_warmup_steps if steps_done is None else steps_done
    state = TrainState(kl_coefficient=config.kl.coefficient, steps_done=steps_done)
    absent = {"value": not config.uses_critic, "average": config.average_decay is None}
    absent["reference"] = not config.kl.needs_reference
    roles = ("policy", "value", "reference", "reward", "average")
    models = {role: None if absent.get(role) else Unknown(role) for role in roles}
    prompts: Any = Unknown("prompts")
    call = TracingCalls(step=1, memory_settings="", models=models)
    workers: Any = SimpleNamespace(**models, shares_trunk=shares_trunk)
    ppo_step(
        call, workers, state, config, prompts_of=lambda _: prompts, reuses_sampled_logprobs=reuses_sampled_logprobs
    )
    return call.trace


def possible_calls(config: PPOConfig, *, shares_trunk: bool) -> dict[str, int]:
    """All calls that steps of this configuration may make, in order, with the number of their inputs."""
    traces = [
        trace_step(config, reuses_sampled_logprobs=reuses, shares_trunk=shares_trunk, steps_done=steps_done)
        for reuses in (True, False)
        for steps_done in (0, config.critic_warmup_steps)
    ]
    return {call.name: call.num_inputs for trace in traces for call in trace}
