"""Connects the difficulty filter of prompts to a PPO run. The filter's rules: data/difficulty.py."""

import warnings
from collections.abc import Sequence

from proximo.data.difficulty import DifficultyFilter, Draw, FilterOptions
from proximo.metrics.values import Last, MetricValue
from proximo.ppo.counted import task_reward_of
from proximo.ppo.recipe import PPORecipe
from proximo.records import Prompt, Scored


def make_difficulty_filter(recipe: PPORecipe, prompts: Sequence[Prompt]) -> DifficultyFilter | None:
    """The recipe's difficulty filter, or None. Raises DataError if it could never leave a prompt out."""
    if recipe.data.filter is None:
        return None
    options = FilterOptions(**recipe.data.filter.model_dump(), min_prompts=recipe.ppo.prompts_per_step)
    return DifficultyFilter([prompt.base_score for prompt in prompts], options, seed=recipe.run.seed)


def update_difficulty(
    difficulty: DifficultyFilter, draws: Sequence[Draw], scored: Sequence[Scored], *, task_reward: str | None = None
) -> dict[str, MetricValue]:
    """Update the filter with the scores of a step, in the order of its draws, and return its metrics.

    It uses raw scores of the reward sources, or their component `task_reward`. Unscored responses do not count.
    """
    size, was_exhausted = len(scored) // len(draws), difficulty.is_used_up
    groups = [scored[start : start + size] for start in range(0, len(scored), size)]
    difficulty.learn(draws, [[task_reward_of(s, task_reward) for s in group if s.valid] for group in groups])
    state = difficulty.state
    if difficulty.is_used_up and not was_exhausted:
        warnings.warn(
            f"data.filter: {difficulty.num_active} prompts are left, as many as a step takes, so that "
            f"{state.kept_beyond_bounds} beyond the bounds stay: there is little left to learn from this data",
            stacklevel=2,
        )
    return {
        "progress/epoch": Last(difficulty.epochs_done),
        "filter/active": Last(difficulty.num_active),
        "filter/too_easy": Last(len(state.too_easy)),
        "filter/too_hard": Last(len(state.too_hard)),
        "filter/kept_beyond_bounds": Last(state.kept_beyond_bounds),
    }
