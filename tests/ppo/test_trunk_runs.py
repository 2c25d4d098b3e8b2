"""Runs with a value head on the policy's trunk: what their checkpoints hold, and what others make of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from proximo.cli import main
from proximo.commands.dry_run import describe
from proximo.commands.generate import GenerateOptions, generate
from proximo.models.language import LanguageModel
from proximo.models.packing import pack
from proximo.models.scalar import ScalarModel
from proximo.ppo.from_recipe import build_task
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.task import PPOTask
from proximo.rollout.sampling import SamplingOptions
from proximo.run.checkpoint_lookup import find_checkpoint
from proximo.run.options import RunOptions
from tiny_runs import LORA, changed, make_inputs, recipe_of, run

TRUNK = {"value": {"init_from": "trunk"}, "ppo.num_steps": 2, "ppo.value_optimizer": {"learning_rate": 1e-5}}
PACKED = pack([[7, 8, 9, 10], [11, 12]])


@pytest.fixture(scope="module", params=["whole", "adapter"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs, and a run of two steps on a trunk; with an adapter, one whose head warmed up first."""
    place = make_inputs(tmp_path_factory.mktemp(request.param))
    changes = {"model.lora": LORA, "ppo.critic_warmup_steps": 1} if request.param == "adapter" else {}
    assert run("ppo", changed(recipe_of("ppo", place), TRUNK | changes), RunOptions(quiet=True)) == 0
    return place


def task_of(place: Path, changes: dict[str, Any]) -> PPOTask:
    recipe = changed(recipe_of("ppo", place), TRUNK | {"run.folder": str(place / "other")} | changes)
    return build_task(PPORecipe.model_validate(recipe))


def scores(model: ScalarModel) -> torch.Tensor:
    with torch.no_grad():
        return model.token_scores(PACKED)


def restored(place: Path) -> PPOTask:
    """The task of the run as it ended."""
    checkpoint = find_checkpoint(place / "run")
    adapter = (checkpoint.folder / "policy" / "adapter_config.json").is_file()
    task = task_of(place, {"model.lora": LORA, "ppo.critic_warmup_steps": 1} if adapter else {})
    task.restore(checkpoint)
    return task


def test_a_checkpoint_holds_the_layers_once(place: Path) -> None:
    folder = find_checkpoint(place / "run").folder
    held = {file.name for file in (folder / "value").iterdir() if file.suffix == ".safetensors"}
    assert held == {"value_head.safetensors"}
    warmed_up = (folder / "policy" / "adapter_config.json").is_file()
    optimizers = {file.name for file in (folder / "optimizer").iterdir()}
    assert optimizers == {"policy.safetensors"} | ({"value.safetensors"} if warmed_up else set())


def test_the_value_head_is_exported_as_a_classifier_and_the_policy_as_a_language_model(place: Path) -> None:
    task, run_folder = restored(place), str(place / "run")
    value = task.ppo.roles.value.model
    assert not value.head_is_zero
    assert main(["export", run_folder, str(place / "critic"), "--role", "value"]) == 0
    exported = ScalarModel(AutoModelForSequenceClassification.from_pretrained(place / "critic"))
    torch.testing.assert_close(scores(exported), scores(value), rtol=0, atol=1e-5)
    assert main(["export", run_folder, str(place / "policy"), "--merge"]) == 0
    policy = LanguageModel(AutoModelForCausalLM.from_pretrained(place / "policy"))
    assert not any("score" in name for name, _ in policy.model.named_parameters())
    with torch.no_grad():
        torch.testing.assert_close(
            policy.hidden_states(PACKED), task.ppo.policy.hidden_states(PACKED), rtol=0, atol=1e-5
        )


def test_another_run_starts_from_the_head_or_from_the_whole_of_it(place: Path) -> None:
    folder = find_checkpoint(place / "run").folder
    value = restored(place).ppo.roles.value.model
    head = value.trained_head()[0]
    whole = task_of(place, {"value": {"path": str(folder / "value")}}).ppo
    assert not whole.roles.shares_trunk
    torch.testing.assert_close(scores(whole.roles.value.model), scores(value), rtol=0, atol=1e-5)
    on_trunk = task_of(place, {"value": {"init_from": "trunk", "path": str(folder / "value")}}).ppo
    assert on_trunk.roles.shares_trunk
    assert on_trunk.roles.value.model.trained_head()[0].equal(head)


def test_the_run_generates_and_evaluates(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = GenerateOptions(sampling=SamplingOptions(max_new_tokens=3))
    assert len(generate(str(place / "run"), ["ab"], options)) == 1
    assert main(["evaluate", str(place / "run")]) == 0
    assert "evaluation/score" in capsys.readouterr().out


def test_a_dry_run_says_that_there_is_no_second_backbone(tmp_path: Path) -> None:
    recipe = changed(recipe_of("ppo", make_inputs(tmp_path)), TRUNK | {"ppo.value_loss": {"coefficient": 0.3}})
    assert "a head on the policy's own backbone" in describe(PPORecipe.model_validate(recipe))
