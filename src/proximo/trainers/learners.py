"""The optimizers of a PPO run and the lengths of their schedules. Not the updates: see updates.py."""

from torch import nn

from proximo.config.ppo import PPOConfig
from proximo.config.run import OptimizerConfig
from proximo.learner.minibatches import num_minibatches
from proximo.learner.update import Learner
from proximo.trainers.calls import Roles
from proximo.trainers.sections import optimizer_options


def make_learners(roles: Roles, config: PPOConfig) -> tuple[Learner, Learner | None]:
    """Of the policy, and of the value model where there is one.

    The policy takes no update in the warm-up of the critic, so its schedule is as long as the steps that are left. On
    a shared trunk the first moves policy and value head, and the second the head alone, in the warm-up, if there is
    one.
    """
    updates_per_step = config.epochs_per_step * num_minibatches(config.responses_per_step, config.responses_per_update)
    rate = 1e-5 if roles.policy.has_adapter else 1e-6
    policy_options = config.policy_optimizer or OptimizerConfig(learning_rate=rate)
    trunk_head = roles.value.base.get_submodule("score") if roles.value is not None and roles.shares_trunk else None
    policy = Learner(
        roles.policy.model if trunk_head is None else nn.ModuleDict({"policy": roles.policy.model, "head": trunk_head}),
        optimizer_options(policy_options),
        num_updates=(config.num_steps - config.critic_warmup_steps) * updates_per_step,
    )
    if roles.value is None or (trunk_head is not None and not config.critic_warmup_steps):
        return policy, None
    options = optimizer_options(config.value_optimizer)
    if trunk_head is not None:
        return policy, Learner(trunk_head, options, num_updates=config.critic_warmup_steps * updates_per_step)
    return policy, Learner(roles.value.model, options, num_updates=config.num_steps * updates_per_step)
