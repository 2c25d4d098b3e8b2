"""The library does what the commands do: `Training` runs a recipe, `SavedRun` uses its folder."""

import hashlib
import json
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from proximo import SavedRun, Training, session_functions
from proximo.cli import main
from proximo.errors import ConfigError, RunFolderError
from tiny_runs import recipe_of, share_of_vowels

CLOCKS = re.compile("^(time|memory|throughput)/|second|cache")
"""Metrics that differ between two runs of the same bits."""


pytestmark = pytest.mark.usefixtures("no_report")


def in_folder(recipe: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    return {**recipe, "run": {**recipe["run"], "folder": str(folder)}}


def weights_of(folder: Path) -> dict[str, str]:
    """Role and file of the last checkpoint -> hash of all its bytes."""
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    files = sorted(last.rglob("*.safetensors"))
    assert files
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def lines_of(folder: Path) -> list[dict[str, float]]:
    """Metrics of each step, without times and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not CLOCKS.search(key)} for line in lines]


@pytest.mark.parametrize("kind", ["ppo", "dpo"])  # test_library_like_commands.py has a pipeline
def test_a_training_has_the_bits_of_the_command(kind, inputs, tmp_path, capsys) -> None:
    recipe = in_folder(recipe_of(kind, inputs), tmp_path / "by_command")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main([kind, str(tmp_path / "recipe.yaml"), "--quiet"]) == 0
    training = Training(in_folder(recipe, tmp_path / "by_library"))
    assert repr(training).startswith(f"Training({kind}")
    run = training.fit(quiet=True)
    assert weights_of(run.folder) == weights_of(tmp_path / "by_command")
    assert lines_of(run.folder) == lines_of(tmp_path / "by_command")
    assert "finished" in repr(run)
    capsys.readouterr()


class _PulledPlug(RuntimeError):
    pass


@pytest.fixture(scope="module")
def own_reward(inputs) -> dict[str, Any]:
    return {**recipe_of("ppo", inputs), "value": {"init_from": "policy"}, "reward": None, "gold": None}


@pytest.fixture(scope="module")
def whole(own_reward, tmp_path_factory) -> SavedRun:
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return Training(in_folder(own_reward, folder), {"reward": [share_of_vowels]}).fit(quiet=True)


def test_a_training_that_ended_within_resumes_with_the_same_bits(own_reward, whole, tmp_path) -> None:
    seen: list[int] = []

    def pull(step: int, metrics: Mapping[str, float]) -> None:
        seen.append(step)
        if step == 2:
            raise _PulledPlug

    changes = {"run.save_every_steps": 1, "reward": [share_of_vowels]}
    cut = Training(in_folder(own_reward, tmp_path / "cut"), changes)
    with pytest.raises(_PulledPlug):
        cut.fit(quiet=True, on_step=pull)
    assert seen == [0, 1, 2]
    with pytest.raises(RunFolderError, match=r'use fit\(resume="must"\).*, fit\(overwrite=True\) to replace'):
        cut.fit(quiet=True)
    assert 'holds a run at step 1: use fit(resume="must") to continue it' in cut.dry_run()
    run = cut.fit(quiet=True, resume="auto")
    assert weights_of(run.folder) == weights_of(whole.folder)
    assert lines_of(run.folder) == lines_of(whole.folder)
    again = cut.fit(quiet=True, resume="auto")
    assert weights_of(again.folder) == weights_of(whole.folder)


NOTEBOOK = """
import json
import sys
from pathlib import Path

from proximo import Training


def score(prompts, responses, metadata):
    return [sum(letter in "aeiou" for letter in text) / (len(text) + 1) for text in responses]


recipe = json.loads(Path(sys.argv[1]).read_text())
training = Training(recipe, {"run.folder": sys.argv[2], "run.save_every_steps": 1, "reward": [score]})
training.fit(resume="auto", quiet=True, on_step=lambda step, metrics: print(step, flush=True))
"""


@pytest.mark.soak
def test_a_notebook_that_is_killed_loses_nothing(own_reward, whole, tmp_path, monkeypatch, capsys) -> None:
    """SIGKILL takes the kernel and with it the function, which the next kernel defines again."""
    (tmp_path / "recipe.json").write_text(json.dumps(own_reward))
    (tmp_path / "cells.py").write_text(NOTEBOOK)
    kernel = [sys.executable, str(tmp_path / "cells.py"), str(tmp_path / "recipe.json"), str(tmp_path / "cut")]
    with subprocess.Popen(kernel, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert next(line for line in killed.stdout if line == "3\n")
        killed.kill()
    assert killed.returncode == -signal.SIGKILL
    monkeypatch.setattr(sys, "argv", kernel[1:])
    runpy.run_path(kernel[1], run_name="__main__")
    assert capsys.readouterr().out.split()[0] in {"3", "4"}
    assert weights_of(tmp_path / "cut") == weights_of(whole.folder)
    scores = [[line.get("score/mean") for line in lines_of(folder)] for folder in (tmp_path / "cut", whole.folder)]
    assert scores[0] == scores[1]


def test_an_interrupt_saves_and_says_how_to_go_on(inputs, tmp_path) -> None:
    recipe = recipe_of("sft", inputs)
    whole = Training(in_folder(recipe, tmp_path / "whole")).fit(quiet=True)
    training = Training(in_folder(recipe, tmp_path / "cut"))

    def interrupt(step: int, metrics: Mapping[str, float]) -> None:
        if step == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="resume='auto'"):
        training.fit(quiet=True, on_step=interrupt)
    assert training.run.metrics[-1]["step"] == 1
    run = training.fit(quiet=True, resume="must")
    assert weights_of(run.folder) == weights_of(whole.folder)


def test_a_function_that_can_be_imported_keeps_its_name_in_the_recipe(inputs, tmp_path) -> None:
    recipe = in_folder(recipe_of("ppo", inputs), tmp_path / "run")
    reward = [{"kind": "function", "function": share_of_vowels}]
    training = Training({**recipe, "value": {"init_from": "policy"}, "reward": reward})
    assert training.recipe.model_dump()["reward"][0]["function"] == "tiny_runs:share_of_vowels"


def test_mistakes_are_found_before_anything_is_loaded(inputs, tmp_path) -> None:
    recipe = in_folder(recipe_of("sft", inputs), tmp_path / "run")
    with pytest.raises(ConfigError, match="learning_rat"):
        Training(recipe, {"sft.optimizer.learning_rat": 1.0})
    with pytest.raises(ConfigError, match="no section .* needs one of .*pipeline$"):
        Training({"run": recipe["run"]})
    with pytest.raises(ConfigError, match="can be read again"):
        Training({**recipe, "data": {"sources": [iter([{"text": "a"}])]}})
    with pytest.raises(ConfigError, match="a data source is"):
        Training({**recipe, "data": {"sources": ["texts.jsonl"]}})
    with pytest.raises(ConfigError, match="plain"):
        Training({**recipe, "sft": {"num_epochs": object}} | {"model": {"path": {1, 2}}})
    with pytest.raises(ConfigError, match="choose one"):
        Training(recipe).fit(overwrite=True, resume="auto")
    for wrong in ("atuo", True):
        with pytest.raises(ConfigError, match="resume is one of never, must, auto"):
            Training(recipe).fit(resume=wrong)
    with pytest.raises(RunFolderError):
        SavedRun(tmp_path / "nothing")


def test_a_function_of_another_process_is_named(monkeypatch) -> None:
    monkeypatch.setattr(session_functions, "scored_elsewhere", share_of_vowels, raising=False)
    assert session_functions.problem("scored_elsewhere") is None
    monkeypatch.undo()
    assert "gives it again" in (session_functions.problem("scored_elsewhere") or "")
    assert session_functions.problem("import_path") is not None


def test_names_of_given_functions_are_distinct() -> None:
    names: dict[str, Any] = {}

    def score() -> None: ...

    first = score

    def score() -> None: ...

    assert session_functions.import_path(first, names) == "proximo.session_functions:score"
    assert session_functions.import_path(score, names) == "proximo.session_functions:score_2"
    assert session_functions.import_path(first, names) == "proximo.session_functions:score"
    assert session_functions.import_path(lambda: None, names) == "proximo.session_functions:function"
