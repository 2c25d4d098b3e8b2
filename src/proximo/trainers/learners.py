"""The optimizers of a PPO run and the lengths of their schedules. Not the updates: see updates.py."""

from proximo.config.ppo import PPOConfig
from proximo.config.run import OptimizerConfig
from proximo.learner.minibatches import num_minibatches
from proximo.learner.update import Learner
from proximo.trainers.calls import Roles
from proximo.trainers.sections import optimizer_options


def make_learners(roles: Roles, config: PPOConfig) -> tuple[Learner, Learner | None]:
    """Of the policy, and of the value model where there is one.

    The policy takes no update in the warm-up of the critic, so its schedule is as long as the steps that are left.
    """
    updates_per_step = config.epochs_per_step * num_minibatches(config.responses_per_step, config.responses_per_update)
    rate = 1e-5 if roles.policy.has_adapter else 1e-6
    policy_options = config.policy_optimizer or OptimizerConfig(learning_rate=rate)
    policy = Learner(
        roles.policy.model,
        optimizer_options(policy_options),
        num_updates=(config.num_steps - config.critic_warmup_steps) * updates_per_step,
    )
    if roles.value is None:
        return policy, None
    options = optimizer_options(config.value_optimizer)
    return policy, Learner(roles.value.model, options, num_updates=config.num_steps * updates_per_step)
