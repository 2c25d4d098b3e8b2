"""What a PPO run tells the filter of prompts, and what it says of it. Its rules are in data/test_difficulty.py."""

import pytest

from proximo.data.difficulty import DifficultyFilter, FilterOptions
from proximo.errors import DataError
from proximo.metrics.values import Last
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.task import make_difficulty_filter, update_difficulty
from proximo.records import ScoreState
from records_made import prompt, response, scored


def test_a_prompt_is_judged_by_the_mean_of_its_responses_that_have_a_score() -> None:
    """Three prompts of two responses: 0.5 on average, 1.0 from the one that could be scored, none at all."""
    found = DifficultyFilter([None] * 3, FilterOptions(above=0.6, below=0.1), seed=0)
    draws = found.draw(3)
    fault = ScoreState.INFRASTRUCTURE_FAULT
    by_row = {0: [(0.0, None), (1.0, None)], 1: [(1.0, None), (0.0, fault)], 2: [(0.0, fault), (0.0, fault)]}
    batch = [
        scored(score, of=response(to=prompt(str(draw.row))), state=state or ScoreState.SCORED)
        for draw in draws
        for score, state in by_row[draw.row]
    ]
    metrics = update_difficulty(found, draws, batch)
    assert (found.state.too_easy, found.state.too_hard) == ((1,), ())
    assert metrics == {
        "progress/epoch": Last(1.0),
        "filter/active": Last(2),
        "filter/too_easy": Last(1),
        "filter/too_hard": Last(0),
        "filter/kept_beyond_bounds": Last(0),
    }


def test_a_warning_says_once_that_nothing_else_would_be_left() -> None:
    found = DifficultyFilter([None] * 3, FilterOptions(above=0.6, min_prompts=2), seed=0)

    def step() -> None:
        draws = found.draw(found.num_active)
        update_difficulty(found, draws, [scored(1.0) for _ in draws])

    with pytest.warns(UserWarning, match="2 prompts are left, as many as a step takes, so that 2 beyond"):
        step()
    step()


def test_the_recipe_says_who_may_leave_and_a_step_how_many_stay() -> None:
    recipe = {
        "run": {"folder": "run"},
        "model": {"path": "a/b"},
        "data": {"sources": [{"path": "c/d"}], "filter": {"below": 0.25, "max_fraction": 0.5, "from_epoch": 0}},
        "reward": [{"kind": "model", "path": "e/f"}],
        "ppo": {"prompts_per_step": 3},
    }
    prompts = [prompt(str(row), base_score=row / 10) for row in range(6)]
    found = make_difficulty_filter(PPORecipe.model_validate(recipe), prompts)
    assert (found.state.too_hard, found.num_active) == ((0, 1, 2), 3)
    with pytest.raises(DataError, match="a step takes 3"):
        make_difficulty_filter(PPORecipe.model_validate(recipe), prompts[:3])
    whole = recipe | {"data": {"sources": [{"path": "c/d"}]}}
    assert make_difficulty_filter(PPORecipe.model_validate(whole), prompts) is None
