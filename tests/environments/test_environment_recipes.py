"""One environment of each form, unchanged, from a recipe of at most 30 lines: a step of training, without a fault."""

from collections.abc import Mapping
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from builders import tiny_language_model, tiny_tokenizer
from proximo.commands.pipeline import run as pipeline
from proximo.commands.pipeline.recipe import PipelineRecipe
from proximo.config.loader import load_recipe
from proximo.data.rows import Row
from proximo.environments.prompts import row_prompts
from proximo.errors import ConfigError, DataError, UserError
from proximo.models.pretrained.saving import save_pretrained
from proximo.ppo.dry_run import dry_run
from proximo.ppo.from_recipe import build_task
from proximo.ppo.recipe import PPORecipe
from proximo.run.options import RunOptions

COMMON = """
run: {folder: FOLDER/run, device: cpu, seed: 3}
model: {path: FOLDER/model}
ppo:
  num_steps: 1
  prompts_per_step: 2
  rollout: {max_new_tokens: 4}
"""
RECIPES = {
    "class": """
environment:
  path: example_environments:Mortal
  max_turns: 2
  workers: 3
""",
    "tools": """
data: {sources: [{path: FOLDER/rows.jsonl}]}
environment:
  kind: tools
  path: example_environments:Counter
  kwargs: {step: 2}
  max_turns: 2
  workers: 2
""",
    "gymnasium": """
environment:
  kind: gymnasium
  id: FrozenLake-v1
  instructions: "Walk to G. 0 is left, 1 down, 2 right, 3 up."
  kwargs: {is_slippery: false, render_mode: ansi}
  max_turns: 3
  workers: 2
""",
    "gem": """
environment:
  kind: gem
  id: game:GuessTheNumber-v0-easy
  max_turns: 3
  max_tokens: 2000
  workers: 2
""",
    "textarena": """
environment:
  kind: textarena
  id: GuessTheNumber-v0
  max_turns: 3
  max_tokens: 2000
  max_observation_tokens: 800
  workers: 2
""",
    "reasoning_gym": """
environment:
  kind: reasoning_gym
  id: basic_arithmetic
  workers: 2
""",
    "skyrl_gym": """
data: {sources: [{path: FOLDER/rows.jsonl}]}
environment:
  kind: skyrl_gym
  id: gsm8k_multi_turn
  workers: 2
""",
}
PACKAGES = {"gymnasium": "gymnasium", "gem": "gem", "textarena": "textarena", "reasoning_gym": "reasoning_gym"} | {
    "skyrl_gym": "skyrl_gym"
}
ROW = '{"prompt": "2 + 2?", "start": 4, "reward_spec": {"ground_truth": "4"}, "extra_info": {"max_turns": 3}}\n'


def recipe(folder: Path, kind: str, changes: Mapping[str, Any] | None = None) -> PPORecipe:
    model = tiny_language_model(max_position_embeddings=2048)
    save_pretrained(model, folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text(ROW * 4)
    text = (COMMON + RECIPES[kind]).replace("FOLDER", str(folder))
    assert len(text.strip().splitlines()) <= 30
    (folder / "recipe.yaml").write_text(text)
    overrides = [f"{key}={value}" for key, value in (changes or {}).items()]
    loaded = load_recipe("ppo", str(folder / "recipe.yaml"), overrides).recipe
    assert isinstance(loaded, PPORecipe)
    return loaded


@pytest.mark.parametrize("kind", [kind for kind in RECIPES if kind != "class"])
def test_an_environment_runs_unchanged_from_a_short_recipe(tmp_path: Path, kind: str) -> None:
    if kind in PACKAGES:
        pytest.importorskip(PACKAGES[kind], reason=f"the package of environments of kind {kind} is not installed")
    task = build_task(recipe(tmp_path, kind))
    try:
        record = task.step(1)
        responses = task.ppo.generate(task.prompts[:2])
    finally:
        task.close()
    assert "environment/turns_mean" in record.metrics
    for response in responses:
        assert response.episode is not None
        assert response.episode.failure is None
        assert response.episode.turns


def test_an_environment_that_dies_costs_its_own_episodes_and_gives_no_reward(tmp_path: Path) -> None:
    chosen = recipe(tmp_path, "class", {"ppo.prompts_per_step": 8, "ppo.guards.max_unscored_fraction": 1})
    task = build_task(chosen)
    try:
        record = task.step(1)
    finally:
        task.close()
    num_faults = record.metrics["environment/faults/died"].total
    assert 0 < num_faults < 8
    scores = record.metrics["score/mean"]
    assert (scores.count, scores.total) == (8 - num_faults, 8 - num_faults)
    assert {each["reason"] for each in record.samples if each["score"] is None} == {
        "died: its process ended with status 9"
    }


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_package_that_is_missing_is_named_before_a_model_is_loaded(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proximo.config.environment.find_spec", lambda name: None)
    from proximo.run.preflight import check_inputs

    with pytest.raises(UserError, match=rf"environment\.id.*pip install 'proximo\[{kind.replace('_', '-')}\]'"):
        check_inputs(recipe(tmp_path, kind))


def test_a_row_that_no_process_can_be_given_is_named_before_a_step() -> None:
    good, bad = (Row(source="days.parquet", number=n, values={"day": day}) for n, day in ((1, "May"), (2, date.max)))
    assert len(row_prompts([good])) == 1
    with pytest.raises(DataError, match="days.parquet, row 2: .*date is not JSON serializable"):
        row_prompts([good, bad])


UNREWARDED = {"environment.path": "example_environments:Unrewarded", "environment.kwargs": "{}"}
JUDGED = {"reward": "[{kind: function, function: 'example_environments:judged'}]"}


def test_a_run_that_rewards_nothing_is_refused_before_a_model_is_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("proximo.ppo.from_recipe.build_language_model", pytest.fail)
    chosen = recipe(tmp_path, "tools", UNREWARDED)
    for find in (build_task, lambda chosen: list(dry_run(chosen))):
        with pytest.raises(ConfigError, match=r"Unrewarded' has no get_reward\(\), and the run has no other reward"):
            find(chosen)


def test_unusable_code_is_found_before_models_load_and_stages_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("proximo.ppo.from_recipe.build_language_model", pytest.fail)
    monkeypatch.setattr(pipeline, "_run", pytest.fail)
    for kind, changes, said in (
        ("class", {"environment.path": "example_environments:Mortl"}, "has no class or function 'Mortl'"),
        ("class", {"environment.kwargs": "{a: 1}"}, "'example_environments:Mortal' is made with a, but"),
        ("tools", UNREWARDED | {"reward": "[]"}, r"has no get_reward\(\)"),
    ):
        chosen = recipe(tmp_path, kind, changes)
        whole = {"run": {"folder": "none"}, "ppo": chosen.model_dump(exclude_unset=True, exclude={"run"})}
        run = partial(pipeline.run_pipeline, PipelineRecipe.model_validate(whole), RunOptions())
        for find in (lambda chosen=chosen: list(dry_run(chosen)), partial(build_task, chosen), run):
            with pytest.raises(ConfigError, match=said):
                find()


def test_a_dry_run_says_what_rewards_the_episodes_and_where_they_come_from(tmp_path: Path) -> None:
    lines = list(dry_run(recipe(tmp_path, "tools", JUDGED)))
    assert ("", "each row of the data below begins an episode") in lines
    assert [text for name, text in lines if name == "reward"] == [
        "environment: what it gives",
        "judged: example_environments:judged (function), weight 1, of the episode",
    ]
    lines = list(dry_run(recipe(tmp_path, "tools", JUDGED | UNREWARDED)))
    assert ("reward", "environment: nothing, since its class has no get_reward()") in lines
    lines = list(dry_run(recipe(tmp_path, "class", {"reward": "[]", "data.sources": "[]"})))
    assert ("", "1,000 episodes, whose rows are their numbers: data has no sources") in lines
    assert ("reward", "environment: what it gives") in lines


def test_a_dry_run_finds_what_a_row_lacks(tmp_path: Path) -> None:
    wanted = r"reset\(\) of environment 'example_environments:Unrewarded' has a parameter 'start'.* no such column"
    with pytest.raises(ConfigError, match=rf"^data has no sources: {wanted}; it has episode"):
        list(dry_run(recipe(tmp_path, "tools", {**JUDGED, **UNREWARDED, "data.sources": "[]"})))
    chosen = recipe(tmp_path, "tools", JUDGED | UNREWARDED)
    list(dry_run(chosen))
    for row, said in (
        ('{"begin": 4}', f"{wanted}; it has begin"),
        ('{"start": 4}', "reward function 'judged' has a parameter 'extra_info'"),
    ):
        (tmp_path / "rows.jsonl").write_text(f"{ROW}{row}\n")
        with pytest.raises(DataError, match=f"rows.jsonl, row 2: {said}"):
            list(dry_run(chosen))
