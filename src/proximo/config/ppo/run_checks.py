"""Checks the options of PPO against the rest of a run: its reward and teacher, and its environment."""

from collections.abc import Sequence

from proximo.config.ppo.losses import ConstantDivisorConfig
from proximo.config.ppo.options import PPOConfig


def distillation_problem(config: PPOConfig, *, has_teacher: bool) -> str | None:
    """The first option that needs scores, or leaves nothing to learn, with the reason; None if all options fit.

    `has_teacher`: the reference is another model than the policy at its start.
    """
    if config.kl.coefficient == 0:
        return (
            "without a reward the policy learns from the KL to its reference alone, and ppo.kl leaves it out: set "
            "ppo.kl.kind to loss or reward with a coefficient above 0, or give a reward"
        )
    if not has_teacher or config.kl.reference_every_steps is not None:
        return (
            "without a reward the policy learns from its reference, the teacher, but the reference is a copy of the "
            "policy: set reference.path to another model and leave out ppo.kl.reference_every_steps, or give a reward"
        )
    if config.uses_critic and config.kl.in_loss:
        return (
            "without a reward and with ppo.kl.kind: loss every return is 0, and advantage gae has nothing to "
            "estimate: set ppo.advantage to return_to_go, which needs no value model"
        )
    for key, is_given in _needs_scores(config).items():
        if is_given:
            return f"ppo.{key} compares scores, and without a reward there are none: remove it, or give a reward"
    return None


def _needs_scores(config: PPOConfig) -> dict[str, bool]:
    """Key -> whether an option is given that reads scores."""
    return {
        "samples_per_prompt": config.samples_per_prompt is not None,
        "advantage.zero_variance_groups": config.advantage.excludes_zero_variance,
        "score.minus_reference_answer": config.score.minus_reference_answer,
        f"advantage {config.advantage.kind}": config.advantage.needs_greedy,
        "task_reward": config.task_reward is not None,
        "solved_score": config.solved_score is not None,
        "evaluate_reference": config.evaluate_reference,
        "guards.max_constant_reward_steps": config.guards.max_constant_reward_steps is not None,
    }


def served_reference_problem(config: PPOConfig) -> str | None:
    """The first option that a reference on servers cannot have, with the reason; None if all options fit.

    vLLM gives the log-prob of each token of a prompt, at temperature 1 whatever is asked for.
    """
    kl, temperature = config.kl, config.rollout.temperature
    estimator = "weighted_k3" if kl.full_in == "loss" else "k1"
    checks = {
        "ppo.kl none needs no reference: set another kind": kl.needs_reference,
        f"ppo.kl.estimator full compares all probabilities, and servers of a reference give one: use {estimator}": (
            kl.full_in is None
        ),
        f"ppo.rollout.temperature {temperature:g} divides the reference's logits, and its servers by 1: set it to 1": (
            temperature == 1
        ),
        "ppo.kl.reference_every_steps moves the reference, and its servers keep their weights: remove it": (
            kl.reference_every_steps is None
        ),
        "ppo.evaluate_reference samples from the reference, and its servers give log-probs alone: remove it": (
            not config.evaluate_reference
        ),
    }
    problem = next((problem for problem, holds in checks.items() if not holds), None)
    return problem and f"{problem}, or remove devices.reference.addresses"


def environment_problem(ppo: PPOConfig, *, reads_text: Sequence[str]) -> str | None:
    """Why a run cannot play in an environment; None if it can. `reads_text`: rewards by models, by name."""
    score, aggregation = ppo.score, ppo.policy_loss.aggregation
    divides_by_turn = isinstance(aggregation, ConstantDivisorConfig) and aggregation.divisor is None
    whole = "which read a prompt and one response, and the conversation of an environment has many turns"
    checks = {
        f"reward {', '.join(reads_text)}: there are reward models, {whole}: remove them, or score in the environment": (
            not reads_text
        ),
        "score.minus_reference_answer compares with an answer of the row, and an environment is played, not answered: "
        "remove it": not score.minus_reference_answer,
        "score.overlong_buffer_tokens measures one response against rollout.max_new_tokens, which is the limit of a "
        "turn here: remove it, and let the environment reward short episodes": score.overlong_buffer_tokens is None,
        "policy_loss.aggregation constant divides by rollout.max_new_tokens, which is the limit of a turn here: set "
        "its divisor to the tokens of an episode": not divides_by_turn,
        "rollout.min_new_tokens counts the tokens of one response, and an episode has several turns: remove it": (
            ppo.rollout.min_new_tokens == 0
        ),
    }
    return next((problem for problem, holds in checks.items() if not holds), None)
