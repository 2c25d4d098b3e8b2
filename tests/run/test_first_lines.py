"""What a run prints before its first step is complete, which may take long: what it is doing, in plain lines."""

from pathlib import Path

import pytest
import yaml

from proximo.cli import main
from proximo.run.options import RunOptions
from tiny_runs import LORA, changed, make_inputs, recipe_of
from tiny_runs import run as run_recipe


def first_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.splitlines()
    return lines[: next(n for n, line in enumerate(lines) if line.startswith("step 1/5  "))]


def test_each_phase_is_said_until_the_first_step_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make_inputs(tmp_path)
    assert run_recipe("ppo", recipe_of("ppo", place), RunOptions()) == 0
    begin, *lines = first_lines(capsys)
    assert begin == "ppo: preparing models and data"
    said = [line.partition(": ")[2] for line in lines if line.startswith(("step 0/5: ", "step 1/5: "))]
    assert said[:4] == ["evaluation", "training", "sampling responses", "scoring responses"]
    assert {"training the policy", "training the value model", "pushing weights"} <= set(said)


def test_the_command_says_what_it_waits_for_and_nothing_if_it_is_to_be_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make_inputs(tmp_path)
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(yaml.safe_dump(changed(recipe_of("sft", place), {"run.save_every_steps": 100})))
    assert main(["sft", str(recipe)]) == 0
    lines = first_lines(capsys)
    assert lines[:2] == ["loading torch and transformers", "sft: preparing models and data"]
    assert lines[-1] == "step 1/5: training"
    assert main(["sft", str(recipe), "--overwrite", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_an_adapter_whose_run_adds_tokens_is_said_to_train_none_of_their_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"model.lora": LORA, "tokenizer.added_tokens": ["<a>", "<b>"], "run.save_every_steps": 100}
    assert run_recipe("sft", changed(recipe_of("sft", make_inputs(tmp_path)), changes), RunOptions()) == 0
    said = [line for line in first_lines(capsys) if "model.lora trains no embedding" in line]
    assert len(said) == 1
    assert "the rows of <a>, <b> stay as they start" in said[0]
