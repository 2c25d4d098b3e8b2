"""Who is who in a PPO run: the workers of the roles, made from what was brought."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from proximo.config.ppo.options import PPOConfig
from proximo.config.ppo.trunk import trunk_problem
from proximo.data.examples import TextExample
from proximo.errors import ConfigError
from proximo.learner.own_optimizer import OwnOptimizer
from proximo.models.cpu.thread_split import operators_are_watched
from proximo.models.dropout import disable_dropout
from proximo.models.language import LanguageModel
from proximo.models.quantised import is_quantised
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.models.sharing.shared_base import base_alone
from proximo.models.sharing.trunk import is_on_trunk, scalar_on
from proximo.ppo.roles.following import AverageWorker
from proximo.ppo.roles.learners import make_learners
from proximo.ppo.roles.policy import PolicyWorker
from proximo.ppo.roles.reference import ReferenceWorker
from proximo.ppo.roles.reward import RewardWorker
from proximo.ppo.roles.value import ValueWorker
from proximo.ppo.roles.worker import RoleWorker
from proximo.ppo.update.overlap import BOTH_UPDATES, trains_side_by_side
from proximo.ppo.update.ptx import make_text_loss
from proximo.rewards.source import RewardSource
from proximo.rollout.engine import Engine
from proximo.rollout.local import LocalEngine
from proximo.run.build.stop_token_ids import ending_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The workers of a run, all in one place."""

    policy: PolicyWorker
    reward: RewardWorker
    reference: ReferenceWorker | None = None
    """None where the KL has no place."""
    value: ValueWorker | None = None
    average: AverageWorker | None = None

    @property
    def group(self) -> dict[str, RoleWorker | RewardWorker]:
        """By the name of the role."""
        return {worker.role: worker for worker in (*self.workers, self.reward)}

    @property
    def workers(self) -> list[RoleWorker]:
        """Those that have a model of their own."""
        return [worker for worker in (self.policy, self.reference, self.value, self.average) if worker is not None]

    @property
    def shares_trunk(self) -> bool:
        """True where the value model is a head on the policy's own layers."""
        return self.value is not None and self.value.is_on_trunk

    @property
    def evaluated(self) -> PolicyWorker | AverageWorker:
        """What an evaluation looks at: the policy, or its average with `evaluate_average`."""
        return self.average if self.average is not None and self.policy.config.evaluate_average else self.policy

    @property
    def calls_together(self) -> tuple[str, ...]:
        """Calls that may run at the same time as things are now; none where somebody looks on."""
        trained = [worker for worker in (self.policy, self.value) if worker is not None]
        allowed = trains_side_by_side(
            self.policy.config,
            device=self.policy.device.type,
            shares_trunk=self.shares_trunk,
            compiled=any(worker.model.backbone.is_compiled for worker in trained),
            quantised=any(is_quantised(worker.model.base) for worker in trained),
            own_optimizers=any(w.learner is not None and isinstance(w.learner.options, OwnOptimizer) for w in trained),
        )
        return BOTH_UPDATES if allowed and not operators_are_watched() else ()


def make_roles(  # noqa: PLR0913 - each is a part that a caller may bring
    policy: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    reference: LanguageModel | None,
    value: ScalarModel | Literal["trunk"] | None,
    config: PPOConfig,
    seed: int,
    reward: RewardSource | None = None,
    engine: Engine | None = None,
    texts: Sequence[TextExample | str] | None = None,
    optimizers: Mapping[str, OwnOptimizer] | None = None,
) -> Roles:
    """The roles that the configuration has a use for. A reference, a critic, an engine that were not brought are made.

    Raises ConfigError where the losses and optimizers of the configuration do not fit what policy and critic share, or
    the full KL would need two models of different devices.
    """
    reference = _reference(reference, policy, config)
    critic = _critic(value, policy, config, seed=seed)
    for model in (policy, critic):
        if model is not None:
            disable_dropout(model.model)
    shares_trunk = critic is not None and is_on_trunk(critic, policy)
    if problem := trunk_problem(config, shares_trunk=shares_trunk):
        raise ConfigError(problem)
    learner, value_learner = make_learners(policy, critic, config, optimizers, shares_trunk=shares_trunk)
    rewarding = RewardWorker(reward, tokenizer, config)
    made = PolicyWorker(
        policy,
        learner,
        config,
        engine=engine or built_in_engine(policy, tokenizer, config),
        seed=seed,
        texts=make_text_loss(texts, policy, tokenizer, config=config, seed=seed),
        neighbour=critic,
        on_finished=rewarding.begin,
    )
    frozen = valuing = average = None
    if reference is not None:
        sampling = built_in_engine(reference, tokenizer, config) if config.evaluate_reference else None
        frozen = ReferenceWorker(reference, config, engine=sampling)
    if critic is not None:
        valuing = ValueWorker(critic, value_learner, config, seed=seed, is_on_trunk=shares_trunk, neighbour=policy)
    if config.average_decay is not None:
        copy = policy.frozen_copy()
        average = AverageWorker(copy, config, engine=built_in_engine(copy, tokenizer, config))
    return Roles(policy=made, reward=rewarding, reference=frozen, value=valuing, average=average)


def _reference(reference: LanguageModel | None, policy: LanguageModel, config: PPOConfig) -> LanguageModel | None:
    if config.kl.apply_to == "none":
        return None
    if reference is None:
        return base_alone(policy) if policy.has_adapter else policy.frozen_copy()
    if config.kl.estimator == "full" and reference.device != policy.device:
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


def built_in_engine(model: LanguageModel, tokenizer: PreTrainedTokenizerBase, config: PPOConfig) -> LocalEngine:
    """An engine over the model's own tensors."""
    endings = ending_ids(model.base, tokenizer)
    return LocalEngine(model, tokenizer, eos_token_ids=endings, max_num_seqs=config.rollout.max_num_seqs)
