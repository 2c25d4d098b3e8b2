"""Builds the workers of all roles of a PPO run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from proximo.config.devices import DevicesConfig
from proximo.config.ppo.options import PPOConfig
from proximo.config.ppo.run_checks import trunk_problem
from proximo.data.examples import TextExample
from proximo.distributed.world import current
from proximo.errors import ConfigError
from proximo.learner.user_optimizer import OwnOptimizer
from proximo.models.bf16_storage import narrow_frozen
from proximo.models.dropout import disable_dropout
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.models.sharing.shared_base import base_alone
from proximo.models.sharing.trunk import is_on_trunk, scalar_on
from proximo.ppo.roles.ahead import RolloutsAhead
from proximo.ppo.roles.learners import make_learners
from proximo.ppo.roles.moving_average import AverageWorker
from proximo.ppo.roles.policy import PolicyWorker, rollout_key, sampling_options
from proximo.ppo.roles.reference import ReferenceWorker
from proximo.ppo.roles.reward import RewardWorker, eager_begin
from proximo.ppo.roles.value import ValueWorker
from proximo.ppo.roles.worker import RoleWorker
from proximo.ppo.update.ptx import make_text_loss
from proximo.rewards.source import RewardSource
from proximo.rollout.asynchronous import SamplingPlan
from proximo.rollout.engine import Engine
from proximo.rollout.engines_on_ranks import on_ranks
from proximo.rollout.local import LocalEngine
from proximo.rollout.stop_token_ids import ending_ids
from proximo.run.make.sharding import shard_model

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The workers of a run, all in one process."""

    policy: PolicyWorker
    reward: RewardWorker
    reference: ReferenceWorker | None = None
    """None in a run without KL."""
    value: ValueWorker | None = None
    average: AverageWorker | None = None
    has_teacher: bool = False
    """Whether the reference is another model than the policy at its start."""

    @property
    def group(self) -> dict[str, RoleWorker | RewardWorker]:
        """Name of a role -> the worker that has its model."""
        return {worker.role: worker for worker in (*self.workers, self.reward)}

    @property
    def workers(self) -> list[RoleWorker]:
        """The workers that have a model."""
        return [worker for worker in (self.policy, self.reference, self.value, self.average) if worker is not None]

    @property
    def shares_trunk(self) -> bool:
        """Whether the value model is a head on the policy's layers."""
        return self.value is not None and self.value.is_on_trunk

    @property
    def evaluated(self) -> PolicyWorker | AverageWorker:
        """The worker to evaluate: the policy, or its average with `evaluate_average`."""
        return self.average if self.average is not None and self.policy.config.evaluate_average else self.policy


def make_roles(  # noqa: PLR0913 - every part can be replaced by the caller
    policy: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    reference: LanguageModel | None,
    value: ScalarModel | Literal["trunk"] | None,
    config: PPOConfig,
    seed: int,
    reward: RewardSource | None = None,
    engine: Engine | None = None,
    texts: Sequence[TextExample | str] | None = None,
    optimizers: Mapping[str, OwnOptimizer] | None = None,
    devices: DevicesConfig | None = None,
) -> Roles:
    """The workers that the configuration needs. Creates reference, critic and engine if they are None.

    On several ranks the models are sharded as `devices` says, after all copies of them were made.

    Raises ConfigError if losses or optimizers do not fit a shared trunk, or the full KL would need models on different
    devices.
    """
    own_reference = reference is None
    reference = _reference(reference, policy, config)
    critic = _critic(value, policy, config, seed=seed)
    copy = None if config.average_decay is None else policy.frozen_copy()
    for model in (policy, critic):
        if model is not None:
            disable_dropout(model.model)
    shares_trunk = critic is not None and is_on_trunk(critic, policy)
    if problem := trunk_problem(config, shares_trunk=shares_trunk):
        raise ConfigError(problem)
    trained = [model.model for model in (policy, critic) if model is not None]
    if reference is not None and own_reference and config.kl.reference_every_steps is None:
        narrow_frozen(reference, beside=trained)
    _shard(devices or DevicesConfig(), policy=policy, value=critic, reference=reference, average=copy)
    learner, value_learner = make_learners(policy, critic, config, optimizers, shares_trunk=shares_trunk)
    reward_worker = RewardWorker(reward, tokenizer, config)
    own_engine = engine is None
    engine = built_in_engine(policy, tokenizer, config) if engine is None else on_ranks(engine)
    policy_worker = PolicyWorker(
        policy,
        learner,
        config,
        engine=engine,
        ahead=_ahead(policy, tokenizer, config, seed=seed, engine=None if own_engine else engine),
        seed=seed,
        texts=make_text_loss(texts, policy, tokenizer, config=config, seed=seed),
        on_finished=lambda: eager_begin(reward_worker.source),
    )
    reference_worker = value_worker = average = None
    if reference is not None:
        reference_engine = built_in_engine(reference, tokenizer, config) if config.evaluate_reference else None
        reference_worker = ReferenceWorker(reference, config, engine=reference_engine)
    if critic is not None:
        value_worker = ValueWorker(critic, value_learner, config, seed=seed, is_on_trunk=shares_trunk)
    if copy is not None:
        average = AverageWorker(copy, config, engine=built_in_engine(copy, tokenizer, config))
    return Roles(
        policy=policy_worker,
        reward=reward_worker,
        reference=reference_worker,
        value=value_worker,
        average=average,
        has_teacher=reference is not None and not own_reference,
    )


def _ahead(
    policy: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    config: PPOConfig,
    *,
    seed: int,
    engine: Engine | None,
) -> RolloutsAhead | None:
    """Sampling ahead, if the configuration asks for it. `engine`: None for the built-in one, on its own weights."""
    if not config.rollout.staleness:
        return None
    if engine is None and current().size > 1:
        raise ConfigError(
            "ppo.rollout.staleness samples while the learner trains, which the built-in engine does on one rank only: "
            "set engine.kind to vllm, or staleness to 0"
        )
    plan = SamplingPlan(
        options=sampling_options(config),
        num_samples=config.sampled_per_prompt,
        key_of=lambda step: rollout_key(seed, step),
        num_steps=config.num_steps,
        staleness=config.rollout.staleness,
    )
    if engine is not None:
        return RolloutsAhead(engine, plan, copies_weights=False)
    # The learner changes its own tensors while this engine samples.
    endings, max_num_seqs = ending_ids(policy.base, tokenizer), config.rollout.max_num_seqs
    copied = LocalEngine(
        policy.frozen_copy(), tokenizer, eos_token_ids=endings, max_num_seqs=max_num_seqs, owns_model=True
    )
    return RolloutsAhead(copied, plan, copies_weights=True)


def _shard(devices: DevicesConfig, *, policy: LanguageModel, **others: LanguageModel | ScalarModel | None) -> None:
    """Shard the models of the roles, those that share the policy's layers together with it."""
    given = {role: model for role, model in others.items() if model is not None}
    on_trunk = next((m for m in given.values() if isinstance(m, ScalarModel) and is_on_trunk(m, policy)), None)
    models = {"policy": policy, **{role: model for role, model in given.items() if model is not on_trunk}}
    shared = {role: [other.model for other in models.values() if other is not model] for role, model in models.items()}
    for role, model in models.items():
        trunk_head = on_trunk if model is policy else None
        shard_model(model, devices, role=role, on_trunk=trunk_head, beside=shared[role])


def _reference(reference: LanguageModel | None, policy: LanguageModel, config: PPOConfig) -> LanguageModel | None:
    if not config.kl.needs_reference:
        return None
    if reference is None:
        return base_alone(policy) if policy.has_adapter else policy.frozen_copy()
    if config.kl.full_in is not None and reference.device != policy.device:
        raise ConfigError(
            f"kl.estimator full compares all probabilities of policy and reference at once, but the policy is on "
            f"{policy.device} and the reference on {reference.device}: put both on one device, or set it to k1"
        )
    return reference


def _critic(
    value: ScalarModel | Literal["trunk"] | None, policy: LanguageModel, config: PPOConfig, *, seed: int
) -> ScalarModel | None:
    if not config.uses_critic:
        return None
    if value == "trunk":
        return scalar_on(policy, seed=seed)
    return scalar_from_language_model(policy, HeadStart.ZERO, seed=seed) if value is None else value


def built_in_engine(model: LanguageModel, tokenizer: "PreTrainedTokenizerBase", config: PPOConfig) -> Engine:
    """The built-in engine, which uses the model's own tensors, on all ranks."""
    endings = ending_ids(model.base, tokenizer)
    return on_ranks(LocalEngine(model, tokenizer, eos_token_ids=endings, max_num_seqs=config.rollout.max_num_seqs))
