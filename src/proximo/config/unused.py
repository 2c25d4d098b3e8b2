"""Keys that a recipe gives and that do nothing, because of another key. Not mistakes: the run is well defined."""

from collections.abc import Iterator

from proximo.config.base import Section
from proximo.config.ppo import PPOConfig
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
        yield from _given(ppo.advantage, ("gamma", "lam"), f"{prefix}advantage.", reason)
        yield from _given(ppo, ("value_loss", "value_optimizer"), prefix, reason)
    if ppo.kl.place == "none":
        yield from _given(ppo.kl, ("measure", "coefficient", "target", "horizon"), f"{prefix}kl.", "place is none")
    elif ppo.kl.target is None:
        yield from _given(ppo.kl, ("horizon",), f"{prefix}kl.", "without target the coefficient does not adapt")
    yield from _unused_in_score(ppo, f"{prefix}score.")
    if ppo.policy_optimizer is not None:
        yield from _unused_in_optimizer(ppo.policy_optimizer, f"{prefix}policy_optimizer.")
    if ppo.uses_critic:
        yield from _unused_in_optimizer(ppo.value_optimizer, f"{prefix}value_optimizer.")


def _unused_in_score(ppo: PPOConfig, prefix: str) -> Iterator[str]:
    score = ppo.score
    if score.running != "none":
        reason = f"running: {score.running} divides by the deviation of the scores, whatever their scale"
        yield from _given(score, ("scale",), prefix, reason)
    if score.running == "standardise":
        yield from _given(score, ("bias",), prefix, "running: standardise subtracts the mean of the scores")
    if score.overlong_buffer_tokens is None:
        yield from _given(score, ("overlong_penalty",), prefix, "overlong_buffer_tokens is null")
    if score.missing_eos_penalty is None and score.min_tokens is None:
        yield from _given(score, ("penalty_mode",), prefix, "there is neither missing_eos_penalty nor min_tokens")
    if ppo.truncated == "mask":
        yield from _given(score, ("missing_eos_penalty",), prefix, "truncated: mask leaves the responses out")


def _unused_in_optimizer(optimizer: OptimizerConfig, prefix: str) -> Iterator[str]:
    if optimizer.schedule == "constant":
        yield from _given(optimizer, ("final_fraction",), prefix, "schedule is constant")


def _given(section: Section, keys: tuple[str, ...], prefix: str, reason: str) -> Iterator[str]:
    values = dict(section)
    for key in keys:
        if values[key] != type(section).model_fields[key].default:
            yield f"{prefix}{key} has no effect: {reason}"
