"""Creates the learners of a PPO run: optimizers and lengths of their schedules. The updates: update/epochs.py."""

from collections.abc import Mapping, Sequence

from torch import nn

from proximo.config.ppo.options import PPOConfig
from proximo.config.run import OptimizerConfig
from proximo.errors import ConfigError
from proximo.learner.expert_balance import ExpertBalance
from proximo.learner.minibatches import num_minibatches
from proximo.learner.update import Learner
from proximo.learner.user_optimizer import OwnOptimizer
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.run.make.conversion import optimizer_options


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
    rate = 1e-5 if policy.has_adapter else 1e-6
    policy_options = config.policy_optimizer or OptimizerConfig(learning_rate=rate)
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
    if not isinstance(own, Mapping):
        raise ConfigError(
            f"optimizers must be a mapping from roles to optimizers, got {type(own).__name__}: write "
            'optimizers={"policy": OwnOptimizer(make=lambda parameters: torch.optim.SGD(parameters, lr=1e-3))}'
        )
    for role, optimizer in own.items():
        if role not in trained:
            raise ConfigError(f"optimizers has an entry {role!r}, but the trained models are {' and '.join(trained)}")
        if not isinstance(optimizer, OwnOptimizer):
            name = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
            raise ConfigError(
                f"optimizers[{role!r}] must be an OwnOptimizer, got {name}: write OwnOptimizer(make=lambda parameters: "
                f"{name}(parameters, lr=...)), since it must hold the trainer's own weights"
            )
        if f"{role}_optimizer" in config.model_fields_set:
            raise ConfigError(
                f"the {role} model has two optimizers, optimizers[{role!r}] and {role}_optimizer of the "
                "configuration: remove one"
            )
