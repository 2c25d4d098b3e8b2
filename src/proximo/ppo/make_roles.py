"""The workers of all roles of a PPO run: built from models, given their learners, and compared between ranks."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from proximo.config.devices import DevicesConfig
from proximo.config.ppo.options import PPOConfig
from proximo.config.ppo.run_checks import served_reference_problem
from proximo.data.examples import TextExample
from proximo.distributed.world import checksum, current
from proximo.environments.engine import Arena
from proximo.errors import ConfigError
from proximo.learner.expert_balance import ExpertBalance
from proximo.learner.optimizers import OwnOptimizer
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.models.sharing import base_alone, is_on_trunk, scalar_on
from proximo.models.transformers_model import disable_dropout
from proximo.ppo.roles.policy import PolicyWorker, rollout_key, sampling_options
from proximo.ppo.roles.sampler import RolloutsAhead
from proximo.ppo.roles.value import ValueWorker
from proximo.ppo.roles.worker import AverageWorker, ReferenceWorker, RewardWorker, ServedReferenceWorker
from proximo.ppo.step import Roles
from proximo.ppo.train_state import TrainState
from proximo.ppo.update.epochs import num_minibatches
from proximo.ppo.update.ptx import make_text_loss
from proximo.records import Experience
from proximo.rewards.source import RewardSource
from proximo.rollout.asynchronous import SamplingPlan
from proximo.rollout.engine import Engine
from proximo.rollout.local import LocalEngine
from proximo.rollout.ranks_engine import on_ranks
from proximo.rollout.stopping import ending_ids
from proximo.run.make.conversion import optimizer_options
from proximo.run.make.sharding import shard_model

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase


def make_roles(  # noqa: PLR0913 - every part can be replaced by the caller
    policy: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    reference: LanguageModel | ServedReferenceWorker | None,
    value: ScalarModel | Literal["trunk"] | None,
    config: PPOConfig,
    seed: int,
    reward: RewardSource | None = None,
    engine: Engine | None = None,
    environments: Arena | None = None,
    texts: Sequence[TextExample | str] | None = None,
    optimizers: Mapping[str, OwnOptimizer] | None = None,
    devices: DevicesConfig | None = None,
) -> Roles:
    """The workers that the configuration needs. Creates reference, critic and engine if they are None.

    `environments`: what all engines play in; None for prompts that are answered.

    On several ranks the models are sharded as `devices` says, after all copies of them were made.

    Raises ConfigError if losses or optimizers do not fit a shared trunk, the full KL would need models on different
    devices, or options do not fit a served reference.
    """
    own_reference = reference is None
    served = reference if isinstance(reference, ServedReferenceWorker) else None
    if served is not None and (problem := served_reference_problem(config)):
        raise ConfigError(problem)
    reference = None if isinstance(reference, ServedReferenceWorker) else _reference(reference, policy, config)
    critic = _critic(value, policy, config, seed=seed)
    copy = None if config.average_decay is None else policy.frozen_copy()
    for model in (policy, critic):
        if model is not None:
            disable_dropout(model.model)
    shares_trunk = critic is not None and is_on_trunk(critic, policy)
    if problem := config.trunk_problem(shares_trunk=shares_trunk):
        raise ConfigError(problem)
    trained = [model.model for model in (policy, critic) if model is not None]
    if reference is not None and own_reference and config.kl.reference_every_steps is None:
        reference.narrow_frozen(beside=trained)
    _shard(devices or DevicesConfig(), policy=policy, value=critic, reference=reference, average=copy)
    learner, value_learner = make_learners(policy, critic, config, optimizers, shares_trunk=shares_trunk)
    reward_worker = RewardWorker(reward, tokenizer, config)
    own_engine, play = engine is None, (lambda engine: engine) if environments is None else environments.engine

    def built_in(model: LanguageModel) -> Engine:
        return on_ranks(play(built_in_engine(model, tokenizer, config)))

    engine = built_in(policy) if engine is None else on_ranks(play(engine))
    policy_worker = PolicyWorker(
        policy,
        learner,
        config,
        engine=engine,
        ahead=_ahead(policy, tokenizer, config, seed=seed, engine=None if own_engine else engine, play=play),
        seed=seed,
        texts=make_text_loss(
            texts, policy, tokenizer, config=config.ptx, seed=seed, token_budget=config.tokens_per_microbatch
        ),
        on_finished=reward_worker.on_finished,
    )
    reference_worker, value_worker, average = served, None, None
    if reference is not None:
        reference_engine = built_in(reference) if config.evaluate_reference else None
        reference_worker = ReferenceWorker(reference, config, engine=reference_engine)
    if critic is not None:
        value_worker = ValueWorker(critic, value_learner, config, seed=seed, is_on_trunk=shares_trunk)
    if copy is not None:
        average = AverageWorker(copy, config, engine=built_in(copy))
    return Roles(
        policy=policy_worker,
        reward=reward_worker,
        reference=reference_worker,
        value=value_worker,
        average=average,
        has_teacher=reference_worker is not None and not own_reference,
    )


def _ahead(
    policy: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    config: PPOConfig,
    *,
    seed: int,
    engine: Engine | None,
    play: Callable[[Engine], Engine],
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
    return RolloutsAhead(play(copied), plan, copies_weights=True)


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
            f"{policy.device} and the reference on {reference.device}: put both on one device, or set it to "
            f"{'weighted_k3' if config.kl.full_in == 'loss' else 'k1'}"
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


def built_in_engine(model: LanguageModel, tokenizer: "PreTrainedTokenizerBase", config: PPOConfig) -> LocalEngine:
    """The built-in engine, which uses the model's own tensors."""
    endings = ending_ids(model.base, tokenizer)
    return LocalEngine(model, tokenizer, eos_token_ids=endings, max_num_seqs=config.rollout.max_num_seqs)


def make_learners(
    policy: LanguageModel,
    value: ScalarModel | None,
    config: PPOConfig,
    own: Mapping[str, OwnOptimizer] | None = None,
    *,
    shares_trunk: bool = False,
) -> tuple[Learner, Learner | None]:
    """The learners of the policy and of the value model, if there is one. `own`: custom optimizers by role.

    The policy is not updated during critic warm-up, so its schedule is as long as the remaining steps. On a shared
    trunk, the policy's learner trains policy and value head, and the second learner trains the head alone during
    warm-up; without warm-up there is none.

    Raises ConfigError for a custom optimizer of a role that is not trained, or that the configuration also sets.
    """
    own = {} if own is None else own
    _check_own(own, ["policy", *([] if value is None else ["value"])], config)
    updates_per_step = config.epochs_per_step * num_minibatches(config.responses_per_step, config.responses_per_update)
    policy_options = config.optimizer_of_policy(has_adapter=policy.has_adapter)
    trunk_head = value.base.get_submodule("score") if value is not None and shares_trunk else None
    trained = policy.model if trunk_head is None else nn.ModuleDict({"policy": policy.model, "head": trunk_head})
    learner = Learner(
        trained,
        own.get("policy") or optimizer_options(policy_options),
        num_updates=(config.num_steps - config.critic_warmup_steps) * updates_per_step,
        sharding=policy.backbone.sharding,
        balance=ExpertBalance.of(policy.backbone),
    )
    if value is None or (trunk_head is not None and not config.critic_warmup_steps):
        return learner, None
    options = own.get("value") or optimizer_options(config.value_optimizer)
    if trunk_head is not None:
        num_updates = config.critic_warmup_steps * updates_per_step
        return learner, Learner(trunk_head, options, num_updates=num_updates, sharding=policy.backbone.sharding)
    return learner, Learner(
        value.model,
        options,
        num_updates=config.num_steps * updates_per_step,
        sharding=value.backbone.sharding,
        balance=ExpertBalance.of(value.backbone),
    )


def _check_own(own: Mapping[str, OwnOptimizer], trained: Sequence[str], config: PPOConfig) -> None:
    if not isinstance(own, Mapping) or not all(isinstance(each, OwnOptimizer) for each in own.values()):
        raise ConfigError(
            "optimizers must be a mapping from roles to their OwnOptimizer, which makes one that holds the trainer's "
            'own weights: {"policy": OwnOptimizer(make=lambda parameters: torch.optim.SGD(parameters, lr=1e-3))}; '
            f"got {own!r:.80}"
        )
    for role in own:
        if role not in trained:
            raise ConfigError(f"optimizers has an entry {role!r}, but the trained models are {' and '.join(trained)}")
        if f"{role}_optimizer" in config.model_fields_set:
            raise ConfigError(
                f"the {role} model has two optimizers, optimizers[{role!r}] and {role}_optimizer of the "
                "configuration: remove one"
            )


def step_digest(experience: Experience, state: TrainState, roles: Roles) -> dict[str, str]:
    """Name of a part -> digest. The weights of a sharded model are not compared: each rank has other ones."""
    digests = {"records": _of_records(experience), "state": _of_text(json.dumps(state.to_json()))}
    of_policy = {id(parameter) for parameter in roles.policy.model.model.parameters()}
    for worker in roles.workers:
        digests[f"state of the {worker.role}"] = _of_text(json.dumps(worker.state()))
        for role, learner in worker.learners.items():
            digests |= {f"{part} of the {role}": value for part, value in learner.digest().items()}
        for role, model in worker.saved_models.items():
            if role not in worker.learners and model.backbone.sharding is None:  # it moves after the policy
                own = [parameter for parameter in model.model.parameters() if id(parameter) not in of_policy]
                digests[f"weights of the {role}"] = f"{checksum(own):016x}"
    return digests


def _of_records(experience: Experience) -> str:
    digest = hashlib.sha256()
    for field in fields(experience):
        value = getattr(experience, field.name)
        if isinstance(value, Tensor):
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    for scored in experience.scored:
        digest.update(repr((scored.response.token_ids, scored.score, scored.state)).encode())
    return digest.hexdigest()[:16]


def _of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
