"""Keys that a recipe gives and that do nothing, because of another key. Not mistakes: the run is well defined."""

from collections.abc import Iterator

from proximo.config.data import DataConfig
from proximo.config.ppo.advantage import AdvantageConfig
from proximo.config.ppo.options import PPOConfig
from proximo.config.recipes import DPORecipe, PipelineRecipe, PPORecipe, RewardRecipe, SFTRecipe
from proximo.config.run import OptimizerConfig
from proximo.config.schema.base import Section


def unused_keys(recipe: Section) -> list[str]:
    """One sentence for every such key, with its full path and the reason."""
    return list(_unused(recipe, ""))


def _unused(recipe: Section, prefix: str) -> Iterator[str]:
    if isinstance(recipe, SFTRecipe | RewardRecipe | DPORecipe | PPORecipe):
        yield from _unused_in_sources(recipe.data, f"{prefix}data.")
        yield from _unused_in_evaluation(recipe, prefix)
    match recipe:
        case PipelineRecipe():
            for name, stage in (("sft", recipe.sft), ("reward", recipe.reward), ("ppo", recipe.ppo)):
                if stage is not None:
                    yield from _unused(stage, f"{prefix}{name}.")
        case SFTRecipe():
            yield from _unused_in_optimizer(recipe.sft.optimizer, f"{prefix}sft.optimizer.")
        case RewardRecipe():
            yield from _unused_in_optimizer(recipe.reward.optimizer, f"{prefix}reward.optimizer.")
        case DPORecipe():
            yield from _unused_in_optimizer(recipe.dpo.optimizer, f"{prefix}dpo.optimizer.")
        case PPORecipe():
            yield from _unused_in_ppo(recipe.ppo, f"{prefix}ppo.")
            yield from _unused_models(recipe, prefix)
            yield from _unused_rewards(recipe, prefix)


def _unused_in_evaluation(recipe: SFTRecipe | RewardRecipe | DPORecipe | PPORecipe, prefix: str) -> Iterator[str]:
    if recipe.data.held_out_rows or recipe.data.evaluation_sources:
        return
    reason = f"nothing is evaluated without {prefix}data.held_out_rows or {prefix}data.evaluation_sources"
    yield from _given(recipe.run, ("evaluate_every_steps",), f"{prefix}run.", reason)
    if isinstance(recipe, PPORecipe):
        keys = ("evaluate_greedy", "evaluation_samples_per_prompt", "evaluate_reference", "evaluate_average")
        yield from _given(recipe.ppo, keys, f"{prefix}ppo.", reason)


def _unused_rewards(recipe: PPORecipe, prefix: str) -> Iterator[str]:
    for index, source in enumerate(recipe.reward):
        if source.weight == 0:
            yield (
                f"{prefix}reward.{index}.weight is 0: the source is asked and shown, and nothing is learned from it; "
                "gold is for a score that is only watched"
            )


def _unused_models(recipe: PPORecipe, prefix: str) -> Iterator[str]:
    if not recipe.ppo.uses_critic:
        yield from _given(recipe, ("value",), prefix, f"advantage {recipe.ppo.advantage.estimator} has no critic")
    if recipe.ppo.kl.apply_to == "none":
        yield from _given(recipe, ("reference",), prefix, "ppo.kl.apply_to is none")


def _unused_in_sources(data: DataConfig, prefix: str) -> Iterator[str]:
    if data.proportions is None:
        yield from _given(data, ("split_seed",), prefix, "without proportions nothing is split")
    for index, source in enumerate(data.sources if data.proportions is None else ()):
        yield from _given(source, ("whole",), f"{prefix}sources.{index}.", "without proportions every source is whole")


def _unused_in_ppo(ppo: PPOConfig, prefix: str) -> Iterator[str]:
    if not ppo.uses_critic:
        reason = f"advantage {ppo.advantage.estimator} has no critic"
        yield from _given(ppo, ("value_loss", "value_optimizer"), prefix, reason)
    elif ppo.value_loss.normalise != "exponential":
        reason = f"normalise is {ppo.value_loss.normalise}"
        yield from _given(ppo.value_loss, ("normalise_decay",), f"{prefix}value_loss.", reason)
    yield from _unused_in_advantage(ppo.advantage, f"{prefix}advantage.")
    if ppo.kl.apply_to == "none":
        yield from _given(
            ppo.kl, ("estimator", "clamp", "coefficient", "target", "horizon"), f"{prefix}kl.", "apply_to is none"
        )
    elif ppo.kl.target is None:
        yield from _given(ppo.kl, ("horizon",), f"{prefix}kl.", "without target the coefficient does not adapt")
    if ppo.kl.reference_every_steps is None:
        yield from _given(ppo.kl, ("reference_decay",), f"{prefix}kl.", "without reference_every_steps it stays")
    yield from _unused_in_losses(ppo, prefix)
    yield from _unused_in_score(ppo, f"{prefix}score.")
    if not ppo.advantage.standardises and ppo.score.whiten_rewards == "none":
        yield from _given(ppo.advantage, ("unbiased_variance",), f"{prefix}advantage.", "nothing is standardised")
    if ppo.rollout.greedy:
        yield from _given(ppo, ("evaluate_greedy",), prefix, "rollout.greedy holds for evaluations too")
    if ppo.policy_optimizer is not None:
        yield from _unused_in_optimizer(ppo.policy_optimizer, f"{prefix}policy_optimizer.")
    if ppo.uses_critic:
        yield from _unused_in_optimizer(ppo.value_optimizer, f"{prefix}value_optimizer.")


def _unused_in_losses(ppo: PPOConfig, prefix: str) -> Iterator[str]:
    policy, guards = ppo.policy_loss, ppo.guards
    if policy.objective in ("sapo", "m2po"):
        reason = f"objective {policy.objective} does not clip"
        yield from _given(policy, ("clip_low", "clip_high"), f"{prefix}policy_loss.", reason)
    if policy.objective != "m2po":
        reason = f"objective {policy.objective} leaves no token out"
        yield from _given(policy, ("max_second_moment",), f"{prefix}policy_loss.", reason)
    if policy.objective != "sapo":
        reason = f"objective {policy.objective} has no gate"
        yield from _given(policy, ("gate_positive", "gate_negative"), f"{prefix}policy_loss.", reason)
    if policy.aggregation != "constant":
        yield from _given(policy, ("divisor",), f"{prefix}policy_loss.", f"aggregation is {policy.aggregation}")
    if policy.behaviour_weight == "none":
        keys = ("behaviour_cap", "behaviour_floor", "behaviour_of")
        yield from _given(policy, keys, f"{prefix}policy_loss.", "behaviour_weight is none")
    if ppo.uses_critic and ppo.value_loss.kind != "huber":
        yield from _given(ppo.value_loss, ("huber_delta",), f"{prefix}value_loss.", f"kind is {ppo.value_loss.kind}")
    if guards.max_kl is not None and guards.target_kl is not None and guards.target_kl <= guards.max_kl:
        yield from _given(guards, ("max_kl",), f"{prefix}guards.", "target_kl ends the step before")


def _unused_in_score(ppo: PPOConfig, prefix: str) -> Iterator[str]:
    score = ppo.score
    if score.normalise != "none":
        reason = f"normalise: {score.normalise} divides by the deviation of the scores, whatever their scale"
        yield from _given(score, ("scale",), prefix, reason)
    if score.normalise == "standardise":
        yield from _given(score, ("bias",), prefix, "normalise: standardise subtracts the mean of the scores")
    if score.overlong_buffer_tokens is None:
        yield from _given(score, ("overlong_penalty",), prefix, "overlong_buffer_tokens is null")
    if score.missing_eos_penalty is None and score.min_tokens is None:
        yield from _given(score, ("penalty_mode",), prefix, "there is neither missing_eos_penalty nor min_tokens")
    if ppo.truncation_value == "mask":
        reason = "truncation_value: mask leaves the responses out"
        yield from _given(score, ("missing_eos_penalty", "truncated_scale"), prefix, reason)


def _unused_in_advantage(advantage: AdvantageConfig, prefix: str) -> Iterator[str]:
    if advantage.estimator != "pass_at_k":
        yield from _given(advantage, ("k",), prefix, f"estimator is {advantage.estimator}")
    if not advantage.uses_critic:
        reason = f"advantage {advantage.estimator} has no critic"
        keys = ("gae_lambda", "length_adaptive", "value_gae_lambda", "least_spread")
        yield from _given(advantage, keys if advantage.goes_by_token else ("gamma", *keys), prefix, reason)
    elif advantage.length_adaptive is not None:
        yield from _given(advantage, ("gae_lambda",), prefix, "length_adaptive sets the decay of each response")


def _unused_in_optimizer(optimizer: OptimizerConfig, prefix: str) -> Iterator[str]:
    if optimizer.schedule == "constant":
        yield from _given(optimizer, ("final_fraction",), prefix, "schedule is constant")


def _given(section: Section, keys: tuple[str, ...], prefix: str, reason: str) -> Iterator[str]:
    values = dict(section)
    for key in keys:
        if values[key] != type(section).model_fields[key].default:
            yield f"{prefix}{key} has no effect: {reason}"
