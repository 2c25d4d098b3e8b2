"""Keys that a recipe gives and that do nothing, because of another key. Not mistakes: the run is well defined."""

from collections.abc import Iterator

from proximo.config.base import Section
from proximo.config.ppo import PPOConfig
from proximo.config.ppo_advantage import AdvantageConfig
from proximo.config.recipes import PipelineRecipe, PPORecipe, RewardRecipe, SFTRecipe
from proximo.config.run import OptimizerConfig


def unused_keys(recipe: Section) -> list[str]:
    """One sentence for every such key, with its full path and the reason."""
    return list(_unused(recipe, ""))


def _unused(recipe: Section, prefix: str) -> Iterator[str]:
    match recipe:
        case PipelineRecipe():
            for name, stage in (("sft", recipe.sft), ("reward", recipe.reward), ("ppo", recipe.ppo)):
                if stage is not None:
                    yield from _unused(stage, f"{prefix}{name}.")
        case SFTRecipe():
            yield from _unused_in_optimizer(recipe.sft.optimizer, f"{prefix}sft.optimizer.")
        case RewardRecipe():
            yield from _unused_in_optimizer(recipe.reward.optimizer, f"{prefix}reward.optimizer.")
        case PPORecipe():
            yield from _unused_in_ppo(recipe.ppo, f"{prefix}ppo.")
            if not recipe.ppo.uses_critic:
                reason = f"advantage {recipe.ppo.advantage.estimator} has no critic"
                yield from _given(recipe, ("value",), prefix, reason)
            if recipe.ppo.kl.place == "none":
                yield from _given(recipe, ("reference",), prefix, "ppo.kl.place is none")


def _unused_in_ppo(ppo: PPOConfig, prefix: str) -> Iterator[str]:
    if not ppo.uses_critic:
        reason = f"advantage {ppo.advantage.estimator} has no critic"
        yield from _given(ppo, ("value_loss", "value_optimizer"), prefix, reason)
    elif ppo.value_loss.normalise != "exponential":
        reason = f"normalise is {ppo.value_loss.normalise}"
        yield from _given(ppo.value_loss, ("normalise_decay",), f"{prefix}value_loss.", reason)
    yield from _unused_in_advantage(ppo.advantage, f"{prefix}advantage.")
    if ppo.kl.place == "none":
        yield from _given(ppo.kl, ("measure", "coefficient", "target", "horizon"), f"{prefix}kl.", "place is none")
    elif ppo.kl.target is None:
        yield from _given(ppo.kl, ("horizon",), f"{prefix}kl.", "without target the coefficient does not adapt")
    if ppo.policy_optimizer is not None:
        yield from _unused_in_optimizer(ppo.policy_optimizer, f"{prefix}policy_optimizer.")
    if ppo.uses_critic:
        yield from _unused_in_optimizer(ppo.value_optimizer, f"{prefix}value_optimizer.")


def _unused_in_advantage(advantage: AdvantageConfig, prefix: str) -> Iterator[str]:
    if not advantage.uses_critic:
        reason = f"advantage {advantage.estimator} has no critic"
        keys = ("lam", "length_adaptive", "value_lam")
        yield from _given(advantage, keys if advantage.goes_by_token else ("gamma", *keys), prefix, reason)
    elif advantage.length_adaptive is not None:
        yield from _given(advantage, ("lam",), prefix, "length_adaptive sets the decay of each response")


def _unused_in_optimizer(optimizer: OptimizerConfig, prefix: str) -> Iterator[str]:
    if optimizer.schedule == "constant":
        yield from _given(optimizer, ("final_fraction",), prefix, "schedule is constant")


def _given(section: Section, keys: tuple[str, ...], prefix: str, reason: str) -> Iterator[str]:
    values = dict(section)
    for key in keys:
        if values[key] != type(section).model_fields[key].default:
            yield f"{prefix}{key} has no effect: {reason}"
