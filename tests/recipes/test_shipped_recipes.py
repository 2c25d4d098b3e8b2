"""What a user changes in a shipped recipe alone works: fewer prompts, a small file, a reward of their own."""

import json
from pathlib import Path

import pytest

from proximo.cli import main
from proximo.config.loader import load_recipe
from proximo.config.recipe import Recipe
from proximo.config.shipped import ShippedRecipe, shipped_recipe, shipped_recipes
from proximo.errors import ConfigError
from proximo.ppo.recipe import PPORecipe

OF_PPO = [each for each in shipped_recipes() if "prompts_per_step" in each.text or each.name == "ppo"]
IN_RESPONSES = ("torchtune-ppo", "torchrl-rlhf", "deepspeed-chat-13b", "deepspeed-chat-13b-step3", "trl-classic")
"""Presets of systems that count the responses of an update."""


def ppo_stage(recipe: Recipe) -> tuple[str, PPORecipe]:
    ((prefix, stage),) = [each for each in recipe.given_stages() if isinstance(each[1], PPORecipe)]
    return prefix, stage


@pytest.mark.parametrize("shipped", OF_PPO, ids=lambda each: each.name)
def test_two_prompts_a_step_are_enough(shipped: ShippedRecipe) -> None:
    prefix, before = ppo_stage(load_recipe(shipped.command, shipped.name).recipe)
    fewer = [f"{prefix}ppo.prompts_per_step=2"]
    if shipped.name in IN_RESPONSES:
        with pytest.raises(ConfigError, match="minibatch_responses.*lower it, or set it to null.*num_minibatches"):
            load_recipe(shipped.command, shipped.name, fewer)
        fewer.append(f"{prefix}ppo.minibatch_responses=null")
    else:
        assert before.ppo.minibatch_responses is None
    _, stage = ppo_stage(load_recipe(shipped.command, shipped.name, fewer).recipe)
    responses = 2 * stage.ppo.responses_per_prompt
    updates = -(-responses // stage.ppo.responses_per_update)
    unit = 2 if stage.ppo.policy_loss.objective.is_pairwise else 1
    assert updates == min(stage.ppo.num_minibatches, responses // unit)


def test_the_updates_of_a_step_are_as_equal_as_they_can_be() -> None:
    found = {}
    for prompts in (1, 2, 7, 8, 10, 64):
        recipe = load_recipe("ppo", "ppo", [f"ppo.prompts_per_step={prompts}"]).recipe
        found[prompts] = ppo_stage(recipe)[1].ppo.responses_per_update
    assert found == {1: 1, 2: 1, 7: 2, 8: 2, 10: 3, 64: 16}


@pytest.mark.parametrize("name", ["grpo-function", "ppo-function", "online-dpo", "trl-classic", "areal-grpo"])
def test_a_reward_of_ones_own_is_shown_under_its_own_name(name: str) -> None:
    for overrides, label in (
        (["reward.0.function=my_reward:kind"], "kind"),
        (["reward.0.function=my_reward:kind", "reward.0.name=mine"], "mine"),
    ):
        (source,) = ppo_stage(load_recipe("ppo", name, overrides).recipe)[1].reward
        assert source.name == label


@pytest.mark.parametrize("name", ["sft", "reward", "dpo", "kto", "ppo", "prm", "grpo-function", "ppo-function"])
def test_a_small_file_keeps_four_fifths_of_its_rows_for_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "a", "response": "b", "chosen": "c", "rejected": "d", "label": True, "answer": "e"}
    columns = {"prm": ("prompt",), "sft": ("prompt", "response"), "kto": ("prompt", "response", "label")}
    columns |= dict.fromkeys(("reward", "dpo"), ("prompt", "chosen", "rejected"))
    lines = [{key: row[key] for key in columns.get(name, ("prompt", "answer"))} for _ in range(50)]
    if name == "prm":
        lines = [line | {"steps": ["a", "b"], "labels": [True, False]} for line in lines]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = shipped_recipe(name).command
    rewards = ['reward=[{kind: function, function: "proximo.recipes.arithmetic:correct"}]'] if name == "ppo" else []
    models = ["model.path=owner/model", "run.device=cpu", *rewards]
    assert main([command, name, "data.sources=[{path: rows.jsonl}]", *models, "--dry-run"]) == 0
    assert (
        "40 rows to learn from, 10 to evaluate on (at most a fifth; held_out_rows asks for " in capsys.readouterr().out
    )
