"""A trainer that is registered from outside gets everything that those of the package have, and nothing names it.

The trainer is `tests/toy_trainer.py`; one call of `register` is all that the package is told.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from proximo import trainer_kinds
from proximo.cli import main, program
from proximo.metrics.catalogue import catalogue
from proximo.trainer_kinds import recipe_kinds, register
from tiny_runs import LLAMA, make_inputs
from toy_trainer import TOY, TOY_CHAIN, ToyTask

OPTIMIZER = {"learning_rate": 1e-2, "schedule": "cosine", "weight_decay": 0.01}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The toy, for the time of a test; who never heard of it does not afterwards."""
    monkeypatch.setattr(trainer_kinds, "_registered", dict(trainer_kinds._registered))
    commands = list(program.app.registered_commands)
    register(TOY)
    yield
    program.app.registered_commands[:] = commands


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_inputs(tmp_path)


def recipe_of(place: Path, folder: str) -> dict[str, Any]:
    return {
        "run": {
            "folder": folder,
            "device": "cpu",
            "num_threads": 1,
            "save_every_steps": 2,
            "evaluate_every_steps": 2,
            "tensorboard": False,
        },
        "model": {"config": LLAMA},
        "tokenizer": {"path": str(place / "tokenizer")},
        "data": {"sources": [{"path": str(place / "texts.jsonl")}], "held_out_rows": 2, "max_tokens": 48},
        "toy": {"num_epochs": 2, "examples_per_step": 4, "weight": 2.0, "optimizer": OPTIMIZER},
    }


def write(place: Path, recipe: dict[str, Any], name: str = "toy.yaml") -> str:
    (place / name).write_text(yaml.safe_dump(recipe, sort_keys=False))
    return name


def lines_of(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [catalogue().repeatable(line) for line in found]


def test_it_has_a_command_with_help_and_a_dry_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "  toy " in capsys.readouterr().out
    assert main(["toy", "--help"]) == 0
    assert "Fine-tune with a weight." in capsys.readouterr().out
    assert main(["toy", write(place, recipe_of(place, "run")), "toy.weight=1", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "one step     4 examples with weight 1, one update" in said.out
    assert "note: toy.weight is 1: it changes nothing" in said.err
    assert not (place / "run").exists()


def test_its_recipe_is_known_checked_and_described(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(place, recipe_of(place, "run"))
    assert main(["config", "show", path]) == 0
    assert "\ntoy:\n" in capsys.readouterr().out
    assert main(["config", "schema", "toy"]) == 0
    assert "ToyConfig" in capsys.readouterr().out
    assert main(["toy", path, "toy.wieght=2"]) == 2
    assert "did you mean toy.weight?" in capsys.readouterr().err
    assert main(["sft", path]) == 2
    assert "is a recipe for `proximo toy`, not for `proximo sft`" in capsys.readouterr().err
    assert main(["toy", path, "model={path: nowhere/at/all}"]) == 2
    assert "model.path" in capsys.readouterr().err


def test_it_has_a_plan(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", write(place, recipe_of(place, "run")), "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["stage"] == "toy"
    assert plan["phases"][0]["peak_bytes"] > 0


def test_a_run_has_progress_alarms_a_report_a_card_and_an_evaluation(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["toy", write(place, recipe_of(place, "run"))]) == 0
    said = capsys.readouterr().err
    assert "toy loss" in said
    assert "The toy is heavy. It is above 1. Lower toy.weight." in said
    page = (place / "run" / "report.html").read_text()
    assert all(words in page for words in ("Toy training", "Loss of the toy", "The toy is heavy", "Toy loss"))
    card = (place / "run" / "checkpoints" / "step-000005" / "policy" / "README.md").read_text()
    assert all(words in card for words in ("training as a toy", "`toy.weight`"))
    assert main(["report", "run"]) == 0
    assert "The toy is heavy" in capsys.readouterr().err
    assert main(["evaluate", "run"]) == 0
    assert "evaluation/loss" in capsys.readouterr().out
    assert main(["evaluate", "run", "--greedy"]) == 2
    assert "this run samples none" in capsys.readouterr().err
    assert main(["export", "run", "exported"]) == 0
    assert (place / "exported" / "config.json").is_file()


def test_a_resumed_run_ends_with_the_same_bits(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = (write(place, recipe_of(place, folder), f"{folder}.yaml") for folder in ("whole", "parts"))
    assert main(["toy", whole, "--quiet"]) == 0
    learn, taken = ToyTask.learn, []

    def dies(task: ToyTask, examples: Any, **given: Any) -> Any:
        taken.append(examples)
        if len(taken) == 4:
            raise KeyboardInterrupt
        return learn(task, examples, **given)

    with monkeypatch.context() as within:
        within.setattr(ToyTask, "learn", dies)
        assert main(["toy", parts, "--quiet"]) == 130
    assert main(["toy", parts, "--quiet", "--resume"]) == 0
    assert lines_of(place / "parts") == lines_of(place / "whole")
    weights = [
        load_file(place / run / "checkpoints/step-000005/policy/model.safetensors") for run in ("whole", "parts")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_it_can_be_a_stage_of_a_pipeline(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    register(TOY_CHAIN)
    run, own = {"folder": "chain"}, recipe_of(place, "")
    shared = {key: own[key] for key in ("tokenizer", "data")}
    sft = {**shared, "model": {"config": LLAMA}, "sft": {"examples_per_step": 4, "optimizer": OPTIMIZER}}
    toy = {**shared, "model": {"path": "@sft"}, "toy": own["toy"]}
    path = write(place, {"run": {**own["run"], **run}, "sft": sft, "toy": toy})
    assert main(["plan", path]) == 0
    assert main(["toy-chain", path, "--dry-run"]) == 0
    assert "stage toy" in capsys.readouterr().out
    assert main(["toy-chain", path, "--quiet"]) == 0
    assert "Loss of the toy" in (place / "chain" / "report.html").read_text()
    assert main(["toy-chain", path, "--quiet", "--resume=auto"]) == 0
    started = json.loads((place / "chain" / "toy" / "config.resolved.json").read_text())["model"]["path"]
    assert Path(started).parts[:3] == ("chain", "sft", "checkpoints")


def test_a_trainer_of_an_installed_package_needs_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its package names it as an entry point, which every command registers."""
    package = tmp_path / "toy-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    points = package / "entry_points.txt"
    points.write_text("[proximo.trainers]\ntoy = toy_trainer:TOY\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "proximo", "toy", "--help"]
    helped = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert "Fine-tune with a weight." in helped.stdout
    points.write_text("[proximo.trainers]\ntoy = toy_trainer:ToyConfig\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    program._register_installed_trainers.cache_clear()  # as in a process that begins
    assert main(["recipes"]) == 2
    said = capsys.readouterr().err
    assert "the trainer toy of an installed package (toy_trainer:ToyConfig) cannot be registered" in said


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="there is a kind of recipe 'toy' already"):
        register(TOY)
    assert [kind.name for kind in recipe_kinds()] == ["sft", "reward", "prm", "dpo", "kto", "ppo", "pipeline", "toy"]
