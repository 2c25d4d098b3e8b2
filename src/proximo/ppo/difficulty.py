"""The filter of prompts in a PPO run: made from the recipe, told the scores. Not its rules: data/difficulty.py."""

import warnings
from collections.abc import Sequence

from proximo.data.difficulty import DifficultyFilter, Draw, FilterOptions
from proximo.metrics.values import Last, MetricValue
from proximo.ppo.counted import task_reward_of
from proximo.ppo.recipe import PPORecipe
from proximo.records import Prompt, Scored


def make_difficulty_filter(recipe: PPORecipe, prompts: Sequence[Prompt]) -> DifficultyFilter | None:
    """None where the recipe has none. Raises DataError where it could never leave a prompt out."""
    if recipe.data.filter is None:
        return None
    options = FilterOptions(**recipe.data.filter.model_dump(), min_prompts=recipe.ppo.prompts_per_step)
    return DifficultyFilter([prompt.base_score for prompt in prompts], options, seed=recipe.run.seed)


def judge_difficulty(
    difficulty: DifficultyFilter, draws: Sequence[Draw], scored: Sequence[Scored], *, task_reward: str | None = None
) -> dict[str, MetricValue]:
    """Tell the filter the scores of a step, in the order of its draws, and say where it stands then.

    Scores are those of the reward sources, before they are shaped, or the component `task_reward` of them; a response
    without one does not count.
    """
    size, was_used_up = len(scored) // len(draws), difficulty.is_used_up
    groups = [scored[start : start + size] for start in range(0, len(scored), size)]
    difficulty.learn(draws, [[task_reward_of(each, task_reward) for each in group if each.valid] for group in groups])
    state = difficulty.state
    if difficulty.is_used_up and not was_used_up:
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
