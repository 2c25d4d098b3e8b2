"""Workers of the roles for tests, without a trainer around them."""

from collections.abc import Mapping, Sequence
from typing import Any

from builders import tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.learner.optimizers import OptimizerOptions
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.models.sharing import is_on_trunk
from proximo.ppo import step
from proximo.ppo.calls import Calls
from proximo.ppo.experience import StepExperience
from proximo.ppo.roles.policy import PolicyWorker
from proximo.ppo.roles.value import ValueWorker
from proximo.ppo.roles.worker import ReferenceWorker, RewardWorker
from proximo.ppo.selection import Batch
from proximo.ppo.step import Roles
from proximo.ppo.step_metrics import StepOutcome
from proximo.ppo.train_state import TrainState
from proximo.ppo.update.ptx import TextLoss
from proximo.records import Experience, Passes, Scored


def roles_of(
    config: PPOConfig,
    policy: LanguageModel,
    *,
    value: ScalarModel | None = None,
    reference: LanguageModel | None = None,
    engine: Any = None,
    source: Any = None,
    learners: dict[str, Learner] | None = None,
    texts: TextLoss | None = None,
) -> Roles:
    """`learners` by role; the policy gets one, the value model on a trunk none."""
    learners = {} if learners is None else learners
    worker = PolicyWorker(
        policy,
        learners.get("policy") or learner_of(policy),
        config,
        engine=engine,
        seed=0,
        texts=texts,
        check_first=False,
    )
    critic = None
    if value is not None:
        trunk = is_on_trunk(value, policy)
        learner = learners.get("value") or (None if trunk else learner_of(value))
        critic = ValueWorker(value, learner, config, seed=0, is_on_trunk=trunk)
    return Roles(
        policy=worker,
        reward=RewardWorker(source, tiny_tokenizer(), config),
        reference=None if reference is None else ReferenceWorker(reference, config),
        value=critic,
    )


def learner_of(model: LanguageModel | ScalarModel) -> Learner:
    return Learner(model.model, OptimizerOptions(learning_rate=1e-3), num_updates=10)


def state(kl_coefficient: float = 0.0, *, steps_done: int = 0) -> TrainState:
    return TrainState(kl_coefficient=kl_coefficient, steps_done=steps_done)


def experience_of(roles: Roles, batch: Sequence[Scored], *, kl_coefficient: float) -> Experience:
    """What a step would learn from these responses, by what the models of the roles say of them."""
    responses, (reference, value) = [each.response for each in batch], (roles.reference, roles.value)
    passes = Passes(
        old_logprobs=roles.policy.logprobs(responses),
        reference_logprobs=None if reference is None else reference.logprobs(responses)[0],
        values=None if value is None else value.values(responses),
    )
    return step.experience_of(batch, passes, state(kl_coefficient), config=roles.policy.config)[0]


def outcome_of(made: StepExperience, *, seconds: Mapping[str, float] | None = None, **given: Any) -> StepOutcome:
    """The outcome of a step that trained on all that it sampled, whose calls took so many seconds."""
    scored, calls = list(made.experience.scored), Calls(step=1, memory_settings="", models={})
    calls.seconds |= seconds or {}
    batch = Batch(scored, [each.response for each in scored], scored, num_rollouts=1, resamples=False)
    return StepOutcome(**({"made": made, "batch": batch, "calls": calls, "policy": None, "value": None} | given))
