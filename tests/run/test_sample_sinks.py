"""The samples of a run reach the trackers that take them: once, after the numbers, and only where asked for."""

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from proximo.metrics.sinks import TrackedRun
from proximo.run.options import RunOptions
from proximo.run.sinks import GuardedSink
from run_outcomes import read_lines
from tiny_runs import changed, make_inputs, recipe_of, run

START = RunOptions(quiet=True)


class Album:
    """Keeps what it is told, in order."""

    told: ClassVar[list[tuple[str, int, Any]]] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        Album.told.append(("numbers", step, None))

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        Album.told.append(("samples", step, [dict(row) for row in samples]))

    def close(self) -> None:
        Album.told.append(("closed", 0, None))


def open_album(run: TrackedRun) -> Album:
    return Album()


@pytest.fixture(autouse=True)
def empty_album(monkeypatch: pytest.MonkeyPatch) -> None:
    Album.told = []
    # It takes longer than the run.
    monkeypatch.setattr("proximo.run.journal.write_report", lambda folder: folder)


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    inputs = make_inputs(tmp_path / "inputs")
    return changed(recipe_of("ppo", inputs), {"run.folder": str(tmp_path / "run"), "run.samples_per_step": 2})


def sampled(recipe: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    lines = read_lines(Path(recipe["run"]["folder"], "samples.jsonl"))
    return [(line.pop("step"), line) for line in lines]


def test_a_sink_that_takes_samples_is_given_those_of_each_step_after_its_numbers(recipe: dict[str, Any]) -> None:
    sink = {"kind": "function", "function": "test_sample_sinks:open_album"}
    assert run("ppo", changed(recipe, {"run.sinks": [sink]}), START) == 0
    rows = [(step, row) for what, step, found in Album.told if what == "samples" for row in found]
    assert [(step, json.loads(json.dumps(row))) for step, row in rows] == sampled(recipe)
    order = [(step, what) for what, step, _ in Album.told if what in ("numbers", "samples")]
    assert order == sorted(order), "numbers before samples"
    assert [what for what, *_ in Album.told[len(order) :]] == ["closed"]


def test_samples_of_a_step_that_is_done_again_are_not_sent_again_and_a_failure_is_counted(tmp_path: Path) -> None:
    warnings: list[str] = []
    place = {"folder": tmp_path, "name": "n", "config": {}, "metrics_file": tmp_path / "none", "warn": warnings.append}
    first = GuardedSink("album", open_album, **place)
    first.write(1, {"a": 1.0})
    first.write_samples(1, [{"prompt": "p"}])
    again = GuardedSink("album", open_album, **place)
    again.write(1, {"a": 1.0})
    again.write_samples(1, [{"prompt": "p"}])
    assert [what for what, *_ in Album.told] == ["numbers", "samples"]
    broken = SimpleNamespace(write=lambda *_: None, close=lambda: None, write_samples=lambda *_: 1 / 0)
    failing = GuardedSink("broken", lambda run: broken, **place)
    failing.write(1, {"a": 1.0})
    failing.write_samples(1, [{"prompt": "p"}])
    assert "ZeroDivisionError" in warnings[0]


@pytest.mark.parametrize("asked", [True, False])
def test_a_tracker_gets_a_table_of_them_where_it_is_told_to(
    recipe: dict[str, Any], asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[tuple[int, dict[str, Any]]] = []
    module = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", loader=None)
    made = SimpleNamespace(
        log=lambda metrics, step: logged.append((step, metrics)),
        finish=lambda: None,
    )
    members = {"init": lambda **_: made, "Settings": dict, "Table": SimpleNamespace, "login": lambda **_: True}
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, "wandb", module)
    sink = {"kind": "wandb", "samples": asked}
    assert run("ppo", changed(recipe, {"run.sinks": [sink]}), START) == 0
    tables = [(step, metrics["samples"]) for step, metrics in logged if "samples" in metrics]
    found = [
        (step, {name: cell for name, cell in zip(table.columns, row, strict=True) if cell is not None})
        for step, table in tables
        for row in table.data
    ]
    if not asked:
        assert found == []
        return
    wanted = [(step, {name: cell for name, cell in row.items() if cell is not None}) for step, row in sampled(recipe)]
    assert [(step, row | {"components": json.loads(row["components"])}) for step, row in found] == wanted


def test_weights_and_biases_itself_takes_the_table(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sinks = [{"kind": "wandb", "samples": True}]
    assert run("ppo", changed(recipe, {"run.sinks": sinks}), START) == 0
    folder = Path(recipe["run"]["folder"])
    assert list((folder / "trackers" / "wandb").glob("offline-run-*/files/media/table/samples_*.table.json"))
    assert "wandb failed" not in (folder / "log.txt").read_text()
