"""Checks the options of PPO for a value head on the policy's trunk."""

from proximo.config.ppo.options import PPOConfig


def trunk_problem(config: PPOConfig, *, shares_trunk: bool) -> str | None:
    """The first incompatible option with the reason; None if all options fit.

    `shares_trunk`: the value model is a head on the policy's trunk (`value.init_from: trunk`).
    """
    if not config.uses_critic:
        return None
    if not shares_trunk and config.value_loss.coefficient is not None:
        return (
            "ppo.value_loss.coefficient weighs the value loss against the policy loss where one update moves both, on "
            "a shared trunk (value.init_from: trunk); a value model of its own has an optimizer of its own: remove it, "
            "and set ppo.value_optimizer.learning_rate"
        )
    own = config.value_optimizer != type(config).model_fields["value_optimizer"].default
    if shares_trunk and own and not config.critic_warmup_steps:
        return (
            "ppo.value_optimizer is not used on a shared trunk (value.init_from: trunk), where policy and value head "
            "have one optimizer, ppo.policy_optimizer: remove it, or set ppo.critic_warmup_steps, in which the head "
            "learns alone, with it"
        )
    return None
