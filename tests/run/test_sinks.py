"""Sinks of a run: each step once over all its processes, failures that do not end it, and the trackers' own calls."""

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from proximo.errors import ConfigError
from proximo.metrics.sinks import TrackedRun
from proximo.run.options import RunOptions
from proximo.run.preflight import check_inputs
from proximo.run.sinks import GuardedSink
from proximo.trainer_kinds import recipe_kind
from run_outcomes import read_lines
from tiny_runs import changed, recipe_of, run

START = RunOptions(quiet=True)
RESUME = RunOptions(quiet=True, resume="must")


class Killed(BaseException):
    """What ends the process in the middle of a step."""


class Book:
    """A tracker that writes down what it is told."""

    opened: ClassVar[list[TrackedRun]] = []
    lines: ClassVar[list[tuple[int, Mapping[str, float]]]] = []
    closed = 0
    fails_at: tuple[int, ...] = ()
    dies_at: int | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step in Book.fails_at:
            raise ConnectionError("the network is away")
        Book.lines.append((step, dict(metrics)))
        if step == Book.dies_at:
            raise Killed

    def close(self) -> None:
        Book.closed += 1

    @staticmethod
    def steps() -> list[int]:
        return [step for step, _ in Book.lines]


def open_book(run: TrackedRun, *, refuses: bool = False) -> Book:
    Book.opened.append(run)
    if refuses:
        raise TimeoutError("no answer")
    return Book()


def open_nothing(run: TrackedRun) -> object:
    return SimpleNamespace(write=print)


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
def empty_book(monkeypatch: pytest.MonkeyPatch) -> None:
    Book.opened, Book.lines, Book.closed, Book.fails_at, Book.dies_at = [], [], 0, (), None
    Album.told = []
    # It takes longer than the run.
    monkeypatch.setattr("proximo.run.journal.write_report", lambda folder: folder)


@pytest.fixture
def recipe(inputs: Path, tmp_path: Path) -> dict[str, Any]:
    return changed(recipe_of("sft", inputs), {"run.folder": str(tmp_path / "run"), "run.sinks": [BOOK]})


BOOK = {"kind": "function", "function": "test_sinks:open_book"}


def go_back(recipe: Mapping[str, Any]) -> None:
    """To the checkpoint before the last, as if the run had been stopped after the fourth of its five steps."""
    Path(recipe["run"]["folder"], "checkpoints", "latest").write_text("step-000004\n")


def metrics_of(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    return read_lines(Path(recipe["run"]["folder"]) / "metrics.jsonl")


def test_a_sink_is_given_every_line_and_told_of_the_run(recipe: dict[str, Any]) -> None:
    assert run("sft", recipe, START) == 0
    assert [{"step": step, **metrics} for step, metrics in Book.lines] == metrics_of(recipe)
    assert Book.steps() == [0, 1, 2, 3, 4, 5]
    assert Book.closed == 1
    (told,) = Book.opened
    assert told.name == recipe["run"]["folder"]
    assert told.config["sft"]["examples_per_step"] == 4
    assert len(told.id) == 32


def test_a_run_that_was_killed_goes_on_in_the_same_run_and_sends_no_step_twice(recipe: dict[str, Any]) -> None:
    """The checkpoint is of step 2, and steps 3 and 4 were sent already: the second had just left the process."""
    Book.dies_at = 4
    with pytest.raises(Killed):
        run("sft", recipe, START)
    assert Book.steps() == [0, 1, 2, 3, 4]
    Book.dies_at = None
    assert run("sft", recipe, RESUME) == 0
    assert Book.steps() == [0, 1, 2, 3, 4, 5]
    first, second = Book.opened
    assert first.id == second.id
    assert run("sft", recipe, RunOptions(quiet=True, overwrite=True)) == 0
    assert Book.opened[2].id != first.id
    assert Book.steps()[6:] == [0, 1, 2, 3, 4, 5]


def test_a_sink_that_is_added_on_a_resume_gets_what_was_before(recipe: dict[str, Any]) -> None:
    without = changed(recipe, {"run.sinks": []})
    run("sft", without, START)
    go_back(recipe)
    assert run("sft", recipe, RESUME) == 0
    assert [{"step": step, **metrics} for step, metrics in Book.lines] == metrics_of(recipe)


def test_a_failure_is_shown_once_counted_and_does_not_end_the_run(recipe: dict[str, Any], capsys) -> None:
    Book.fails_at = (1, 3)
    assert run("sft", recipe, START) == 0
    assert Book.steps() == [0, 2, 4, 5]
    said = capsys.readouterr().err
    assert said.count("the network is away") == 1
    assert "test_sinks:open_book failed 2 times; metrics.jsonl has every line" in " ".join(said.split())
    counted = {line["step"]: line.get("progress/sink_failures") for line in metrics_of(recipe)}
    assert counted == {0: None, 1: None, 2: 1, 3: None, 4: 1, 5: None}


def test_three_failures_in_a_row_give_a_sink_up_and_a_resume_sends_what_it_missed(recipe: dict[str, Any]) -> None:
    Book.fails_at = (1, 2, 3)
    assert run("sft", recipe, START) == 0
    assert Book.steps() == [0]
    assert Book.closed == 1
    go_back(recipe)
    Book.fails_at = ()
    assert run("sft", recipe, RESUME) == 0
    assert Book.steps() == [0, 1, 2, 3, 4, 5]


def test_a_tracker_that_cannot_be_opened_does_not_end_the_run(recipe: dict[str, Any], capsys) -> None:
    assert run("sft", changed(recipe, {"run.sinks": [BOOK | {"kwargs": {"refuses": True}}]}), START) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "the run continues (TimeoutError: no answer)" in said
    assert "failed 7 times" in said


def test_a_sink_of_ones_own_is_told_its_name_and_arguments(recipe: dict[str, Any]) -> None:
    own = BOOK | {"name": "mine", "kwargs": {"refuses": False}}
    assert run("sft", changed(recipe, {"run.sinks": [own]}), START) == 0
    assert Book.opened[0].name == "mine"


def test_a_function_that_returns_no_sink_is_a_mistake_and_not_a_failure(recipe: dict[str, Any]) -> None:
    wrong = [{"kind": "function", "function": "test_sinks:open_nothing"}]
    with pytest.raises(ConfigError, match=r"has write\(step, metrics\).*it \(SimpleNamespace\) has no method close"):
        run("sft", changed(recipe, {"run.sinks": wrong}), START)


def test_a_package_that_is_missing_is_named_with_its_extra(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proximo.run.preflight.find_spec", lambda name: None)
    without = changed(recipe, {"run.sinks": [{"kind": "wandb"}]})
    with pytest.raises(ConfigError, match=r"run.sinks.0: its package .*pip install 'proximo\[wandb\]'"):
        check_inputs(recipe_kind("sft").schema.model_validate(without))


async def open_later(run: TrackedRun) -> Book:
    return Book()


class LateBook(Book):
    async def write(self, step: int, metrics: Mapping[str, float]) -> None:
        pass


class NoBook:
    async def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        pass


def open_no_book(run: TrackedRun) -> Any:
    return NoBook()


def open_book_class(run: TrackedRun) -> Any:
    return Book


def open_late_book(run: TrackedRun) -> Book:
    return LateBook()


@pytest.mark.parametrize(
    ("sink", "problem"),
    [
        ({"function": "test_sinks:open_later"}, "run.sinks.0: test_sinks:open_later.*it is async"),
        ({"function": "test_sinks:open_book", "kwargs": {"refuse": 1}}, r"run.sinks.0: .*\(run, refuse=...\)"),
        (
            {"function": "test_sinks:open_no_book"},
            r"no method write\(step, metrics\) and no method close\(\); write_samples\(step, samples\) cannot be",
        ),
        ({"function": "test_sinks:open_book_class"}, "it is the class Book, not an object of it"),
        ({"function": "test_sinks:open_late_book"}, r"write\(step, metrics\) cannot be called, since it is async"),
    ],
)
def test_a_sink_that_could_not_be_used_is_a_mistake(recipe: dict[str, Any], sink: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run("sft", changed(recipe, {"run.sinks": [{"kind": "function", **sink}]}), START)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, list]:
    """A module in the place of wandb, and the calls that it got."""
    calls: dict[str, list] = {"init": [], "log": [], "finish": []}
    made = SimpleNamespace(
        log=lambda metrics, step: calls["log"].append((step, metrics)), finish=lambda: calls["finish"].append(True)
    )

    def init(**given: Any) -> SimpleNamespace:
        calls["init"].append(given)
        return made

    module = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", loader=None)
    vars(module).update(init=init, Settings=lambda **given: given, login=lambda **_: True, Table=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def sampled(recipe: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    lines = read_lines(Path(recipe["run"]["folder"], "samples.jsonl"))
    return [(line.pop("step"), line) for line in lines]


def test_a_sink_that_takes_samples_is_given_those_of_each_step_after_its_numbers(recipe: dict[str, Any]) -> None:
    sink = {"kind": "function", "function": "test_sinks:open_album"}
    assert run("sft", changed(recipe, {"run.sinks": [sink]}), START) == 0
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
    inputs: Path, tmp_path: Path, asked: bool, stand_in: dict[str, list]
) -> None:
    sinks = {"run.folder": str(tmp_path / "run"), "run.sinks": [{"kind": "wandb", "samples": asked}]}
    recipe = changed(recipe_of("ppo", inputs), {**sinks, "ppo.num_steps": 2})
    assert run("ppo", recipe, START) == 0
    tables = [(step, metrics["samples"]) for step, metrics in stand_in["log"] if "samples" in metrics]
    found = [
        (step, {name: cell for name, cell in zip(table.columns, row, strict=True) if cell is not None})
        for step, table in tables
        for row in table.data
    ]
    wanted = [(step, {name: cell for name, cell in row.items() if cell is not None}) for step, row in sampled(recipe)]
    assert [(step, row | {"components": json.loads(row["components"])}) for step, row in found] == (
        wanted if asked else []
    )


def test_weights_and_biases_is_told_the_id_of_the_run(
    recipe: dict[str, Any], stand_in: dict[str, list], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = {"kind": "wandb", "project": "p", "name": "mine"}
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("wandb.login", lambda **_: False)
    with pytest.raises(ConfigError, match="run.sinks.0: nobody is logged in: .* or set WANDB_MODE=offline"):
        run("sft", changed(recipe, {"run.sinks": [sink]}), START)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert run("sft", changed(recipe, {"run.sinks": [sink]}), START) == 0
    (given,) = stand_in["init"]
    folder = Path(recipe["run"]["folder"], "trackers")
    kept = json.loads((folder / "wandb.json").read_bytes())
    assert {name: given[name] for name in ("project", "name", "id", "resume", "dir")} == {
        "project": "p",
        "name": "mine",
        "id": kept["id"],
        "resume": "allow",
        "dir": str(folder),
    }
    assert given["config"]["sft"]["num_epochs"] == 2
    assert [{"step": step, **metrics} for step, metrics in stand_in["log"]] == metrics_of(recipe)
    assert stand_in["finish"] == [True]


def test_weights_and_biases_itself_writes_offline_and_goes_on_with_its_id(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    recipe = changed(recipe, {"run.sinks": [{"kind": "wandb", "samples": True}]})
    assert run("sft", recipe, START) == 0
    folder = Path(recipe["run"]["folder"])
    assert list((folder / "trackers" / "wandb").glob("offline-run-*/files/media/table/samples_*.table.json"))
    assert "wandb failed" not in (folder / "log.txt").read_text()
    identity = json.loads((folder / "trackers" / "wandb.json").read_bytes())["id"]
    go_back(recipe)
    assert run("sft", recipe, RESUME) == 0
    written = sorted((folder / "trackers" / "wandb").glob("offline-run-*"))
    assert [path.name.rpartition("-")[2] for path in written] == [identity, identity]


def test_weights_and_biases_itself_is_refused_online_where_nobody_is_logged_in(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="run.sinks.0: nobody is logged in"):
        run("sft", changed(recipe, {"run.sinks": [{"kind": "wandb"}]}), START)
    assert not Path(recipe["run"]["folder"]).exists()
