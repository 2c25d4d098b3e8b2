"""What is printed before what may take long: what a command loads, and what a run is doing, in plain lines."""

import io
import sys
from pathlib import Path

import pytest
import yaml

from proximo.cli import main
from proximo.run.options import RunOptions
from tiny_runs import LORA, changed, make_inputs, recipe_of
from tiny_runs import run as run_recipe

LOADING = "loading torch and transformers"
OTHERS = (
    ("generate", "RUN", "ab", "--max-new-tokens", "4"),
    ("evaluate", "RUN"),
    ("export", "RUN", "OUT"),
    ("chat", "RUN", "--max-new-tokens", "4"),
    ("plan", "RECIPE"),
    ("report", "RUN"),
)


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
    assert lines[:2] == [LOADING, "sft: preparing models and data"]
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


def test_every_command_that_loads_a_model_says_so_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_inputs(tmp_path)
    made = changed(recipe_of("ppo", place), {"ppo.num_steps": 1})
    assert run_recipe("ppo", made, RunOptions(quiet=True)) == 0
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(made))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for command, *arguments in OTHERS:
        out = tmp_path / f"{command}.out"
        names = {"RUN": place / "run", "RECIPE": tmp_path / "ppo.yaml", "OUT": out}
        capsys.readouterr()
        assert main([command, *(str(names.get(each, each)) for each in arguments)]) == 0, command
        said = capsys.readouterr().err.splitlines()
        assert said[0] == ("loading matplotlib" if command == "report" else LOADING), command
