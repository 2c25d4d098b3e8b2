"""Keys of a PPO recipe that have no effect because of another key. Shared sections: config/ineffective_keys.py."""

from collections.abc import Iterator

from proximo.config.ineffective_keys import given_keys, nothing_evaluated
from proximo.config.ppo.options import PPOConfig
from proximo.ppo.recipe import PPORecipe


def ineffective_keys(recipe: PPORecipe, prefix: str) -> Iterator[str]:
    """One sentence for each such key, with its full path and the reason."""
    if reason := nothing_evaluated(recipe.data, f"{prefix}data"):
        keys = ("evaluate_greedy", "evaluation_samples_per_prompt", "evaluate_reference", "evaluate_average")
        yield from given_keys(recipe.ppo, keys, f"{prefix}ppo.", reason)
    yield from _unused_in_ppo(recipe.ppo, f"{prefix}ppo.")
    yield from _unused_models(recipe, prefix)
    if recipe.sampler_is_exact:
        reason = "with run.precision float32 and the built-in engine, sampled log-probs are the learner's own"
        yield from given_keys(recipe.ppo.guards, ("max_mismatch",), f"{prefix}ppo.guards.", reason)
    yield from _unused_rewards(recipe, prefix)
    if not recipe.reward and recipe.ppo.kl.in_loss:
        yield from _unused_without_advantages(recipe.ppo, f"{prefix}ppo.")


def _unused_without_advantages(ppo: PPOConfig, prefix: str) -> Iterator[str]:
    """Keys that act on advantages: without a reward, and with the KL in the loss, all of them are 0."""
    reason = "without a reward, and with kl.kind: loss, all advantages are 0"
    keys = ("objective", "behaviour_weight")
    yield from given_keys(ppo.policy_loss, keys, f"{prefix}policy_loss.", reason)
    yield from given_keys(ppo.advantage, ("gamma", "standardise"), f"{prefix}advantage.", reason)


def _unused_rewards(recipe: PPORecipe, prefix: str) -> Iterator[str]:
    for index, source in enumerate(recipe.reward):
        if source.weight == 0:
            yield (
                f"{prefix}reward.{index}.weight is 0: the source is asked and shown, and nothing is learned from it; "
                "gold is for a score that is only watched"
            )


def _unused_models(recipe: PPORecipe, prefix: str) -> Iterator[str]:
    if not recipe.ppo.uses_critic:
        yield from given_keys(recipe, ("value",), prefix, f"advantage {recipe.ppo.advantage.kind} has no critic")
    if not recipe.ppo.kl.needs_reference:
        yield from given_keys(recipe, ("reference",), prefix, "ppo.kl is none")


def _unused_in_ppo(ppo: PPOConfig, prefix: str) -> Iterator[str]:
    if ppo.minibatch_responses is not None:
        yield from given_keys(ppo, ("num_minibatches",), prefix, f"minibatch_responses is {ppo.minibatch_responses}")
    if not ppo.uses_critic:
        reason = f"advantage {ppo.advantage.kind} has no critic"
        yield from given_keys(ppo, ("value_loss", "value_optimizer"), prefix, reason)
    yield from _unused_in_advantage(ppo, f"{prefix}advantage.")
    if ppo.policy_loss.is_pairwise:
        yield from given_keys(ppo, ("keep_groups_together",), prefix, "pairs are always kept together")
    if ppo.kl.reference_every_steps is None:
        yield from given_keys(ppo.kl, ("reference_decay",), f"{prefix}kl.", "without reference_every_steps it stays")
    yield from _unused_in_losses(ppo, prefix)
    yield from _unused_in_score(ppo, f"{prefix}score.")
    if ppo.rollout.greedy:
        yield from given_keys(ppo, ("evaluate_greedy",), prefix, "rollout.greedy holds for evaluations too")


def _unused_in_losses(ppo: PPOConfig, prefix: str) -> Iterator[str]:
    policy, guards = ppo.policy_loss, ppo.guards
    if policy.is_pairwise:
        reason = f"objective {policy.objective.kind} is the mean over pairs"
        yield from given_keys(policy, ("aggregation",), f"{prefix}policy_loss.", reason)
    if guards.max_kl is not None and guards.target_kl is not None and guards.target_kl <= guards.max_kl:
        yield from given_keys(guards, ("max_kl",), f"{prefix}guards.", "target_kl ends the step before")


def _unused_in_score(ppo: PPOConfig, prefix: str) -> Iterator[str]:
    score = ppo.score
    if score.normalise != "none":
        reason = f"normalise: {score.normalise} divides by the deviation of the scores, whatever their scale"
        yield from given_keys(score, ("scale",), prefix, reason)
    if score.normalise == "standardise":
        yield from given_keys(score, ("bias",), prefix, "normalise: standardise subtracts the mean of the scores")
    if score.overlong_buffer_tokens is None:
        yield from given_keys(score, ("overlong_penalty",), prefix, "overlong_buffer_tokens is null")
    if score.missing_eos_penalty is None and score.min_tokens is None:
        yield from given_keys(score, ("penalty_mode",), prefix, "there is neither missing_eos_penalty nor min_tokens")
    if ppo.truncation.masks:
        reason = "truncation: mask leaves the responses out"
        yield from given_keys(score, ("missing_eos_penalty",), prefix, reason)


def _unused_in_advantage(ppo: PPOConfig, prefix: str) -> Iterator[str]:
    advantage = ppo.advantage
    if advantage.model_dump().get("length_adaptive") is not None:
        yield from given_keys(advantage, ("gae_lambda",), prefix, "length_adaptive sets the decay of each response")
    if advantage.most_rollouts == 1:
        yield from given_keys(advantage, ("resample_rounds",), prefix, "zero_variance_groups is not resample")
    if not advantage.standardise and ppo.score.whiten_rewards == "none":
        yield from given_keys(advantage, ("unbiased_variance",), prefix, "nothing is standardised")
