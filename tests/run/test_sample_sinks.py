"""The samples of a run reach the trackers that take them: once, after the numbers, and only where asked for."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from proximo.metrics.sinks import MLflowSink, TrackedRun
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

    def write_report(self, page: Path) -> None:
        Album.told.append(("report", 0, page))

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
    assert [what for what, *_ in Album.told[len(order) :]] == ["report", "closed"]


def test_a_run_that_fails_sends_its_report_and_one_that_is_stopped_sends_none(recipe: dict[str, Any]) -> None:
    sink = {"kind": "function", "function": "test_sample_sinks:open_album"}

    def fail(step: int, line: Mapping[str, float]) -> None:
        raise ArithmeticError("no")

    def stop(step: int, line: Mapping[str, float]) -> None:
        if step == 1:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(ArithmeticError):
        run("ppo", changed(recipe, {"run.sinks": [sink]}), replace(START, on_step=fail))
    assert [what for what, *_ in Album.told[-2:]] == ["report", "closed"]
    Album.told = []
    again = replace(START, on_step=stop, overwrite=True)
    assert run("ppo", changed(recipe, {"run.sinks": [sink]}), again) == 128 + signal.SIGTERM
    assert [what for what, *_ in Album.told if what in ("report", "closed")] == ["closed"]


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
    assert failing.num_failures == 1
    assert "ZeroDivisionError" in warnings[0]


class MadeArtifact:
    """An artifact of Weights & Biases."""

    def __init__(self, name: str, type: str) -> None:
        self.name, self.type, self.files = name, type, []

    def add_file(self, path: str) -> None:
        self.files.append(path)


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
@pytest.mark.parametrize("asked", [True, False])
def test_a_tracker_gets_a_table_of_them_and_the_report_where_it_is_told_to(
    recipe: dict[str, Any], kind: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[tuple[int, dict[str, Any]]] = []
    artifacts: list[tuple[Any, dict[str, str]]] = []
    module = ModuleType(kind)
    module.__spec__ = ModuleSpec(kind, loader=None)
    made = SimpleNamespace(
        log=lambda metrics, step: logged.append((step, metrics)),
        log_artifact=lambda given, **names: artifacts.append((given, names)),
        finish=lambda: None,
    )
    members = {"init": lambda **_: made, "Settings": dict, "Table": SimpleNamespace, "login": lambda **_: True}
    vars(module).update(members, Artifact=MadeArtifact)
    monkeypatch.setitem(sys.modules, kind, module)
    sink = {"kind": kind, "samples": asked}
    assert run("ppo", changed(recipe, {"run.sinks": [sink]}), START) == 0
    tables = [(step, metrics["samples"]) for step, metrics in logged if "samples" in metrics]
    found = [
        (step, {name: cell for name, cell in zip(table.columns, row, strict=True) if cell is not None})
        for step, table in tables
        for row in table.data
    ]
    if not asked:
        assert (found, artifacts) == ([], [])
        return
    wanted = [(step, {name: cell for name, cell in row.items() if cell is not None}) for step, row in sampled(recipe)]
    assert [(step, row | {"components": json.loads(row["components"])}) for step, row in found] == wanted
    folder = Path(recipe["run"]["folder"])
    identity = json.loads((folder / "trackers" / f"{kind}.json").read_bytes())["id"]
    ((artifact, names),) = artifacts
    if kind == "wandb":
        assert (artifact.name, artifact.type, artifact.files) == (f"report-{identity}", "report", [str(folder)])
    else:
        assert (artifact, names) == (folder, {"name": f"report-{identity[:8]}", "type": "report"})


def test_weights_and_biases_itself_takes_the_table_and_the_report(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")

    def written(folder: Path) -> Path:
        (folder / "report.html").write_text("the page")
        return folder / "report.html"

    monkeypatch.setattr("proximo.run.journal.write_report", written)
    monkeypatch.setenv("WANDB_MODE", "offline")
    sinks = [{"kind": "wandb", "samples": True}]
    assert run("ppo", changed(recipe, {"run.sinks": sinks}), START) == 0
    folder = Path(recipe["run"]["folder"])
    assert list((folder / "trackers" / "wandb").glob("offline-run-*/files/media/table/samples_*.table.json"))
    (kept,) = (folder / "trackers" / "wandb").glob("offline-run-*/*.wandb")
    assert b"report.html" in kept.read_bytes()
    assert "progress/sink_failures" not in read_lines(folder / "metrics.jsonl")[-1]


@pytest.mark.parametrize("with_pandas", [True, False])
def test_mlflow_gets_held_out_ones_as_tables_and_those_of_training_as_a_file_of_each_step(
    with_pandas: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr("proximo.metrics.sinks.find_spec", lambda name: object() if with_pandas else None)
    sink = object.__new__(MLflowSink)
    client = SimpleNamespace(
        log_text=lambda *given: told.append(("text", *given)),
        log_table=lambda *given: told.append(("table", *given)),
        log_artifact=lambda *given: told.append(("artifact", *given)),
    )
    vars(sink).update(_run_id="r", _client=client)
    held_out = [{"kind": "evaluation", "prompt": "p", "components": {"a": 1.0}}, {"kind": "evaluation", "prompt": "q"}]
    sink.write_samples(10, [{"kind": "train", "prompt": "t"}, *held_out])
    sink.write_report(Path("run/report.html"))
    train, *rest = ['{"kind": "train", "prompt": "t"}\n', *(json.dumps(row) + "\n" for row in held_out)]
    table = {
        "step": [10, 10],
        "kind": ["evaluation", "evaluation"],
        "prompt": ["p", "q"],
        "components": ['{"a": 1.0}', None],
    }
    assert told == [
        *([("table", "r", table, "samples/evaluation.json")] if with_pandas else []),
        ("text", "r", train if with_pandas else "".join([train, *rest]), "samples/step-000010.jsonl"),
        ("artifact", "r", "run/report.html"),
    ]


@pytest.mark.filterwarnings("ignore")  # what its own dependencies deprecate
def test_mlflow_itself_shows_one_table_of_all_evaluations_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("mlflow.tracking", reason="the extra mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="mlflow-skinny alone keeps no database")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = tracking.MlflowClient(tracking_uri=uri)
    client.create_experiment("e", artifact_location=str(tmp_path / "artifacts"))
    told = TrackedRun(id="ab" * 16, name="mine", folder=tmp_path, config={})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    sink = MLflowSink(told, project="e")
    for step in (0, 5):
        sink.write_samples(step, [{"kind": "evaluation", "prompt": "p", "score": step / 2, "components": {"a": 1.0}}])
    (tmp_path / "report.html").write_text("the page")
    sink.write_report(tmp_path / "report.html")
    sink.close()
    (found,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    kept = Path(client.download_artifacts(found.info.run_id, "", str(tmp_path)))
    table = json.loads((kept / "samples" / "evaluation.json").read_text())
    assert table["columns"] == ["step", "kind", "prompt", "score", "components"]
    assert table["data"] == [[0, "evaluation", "p", 0.0, '{"a": 1.0}'], [5, "evaluation", "p", 2.5, '{"a": 1.0}']]
    assert json.loads(found.data.tags["mlflow.loggedArtifacts"]) == [
        {"path": "samples/evaluation.json", "type": "table"}
    ]
    assert (kept / "report.html").read_text() == "the page"


TRACKIO_RUN = """
import sys
from pathlib import Path
from proximo.metrics.sinks import TrackedRun, TrackioSink
folder = Path(sys.argv[1])
sink = TrackioSink(TrackedRun(id="ab" * 16, name="mine", folder=folder, config={}), project="p")
sink.write(1, {"score/mean": 1.0})
sink.write_samples(1, [{"prompt": "q", "components": {"a": 1.0}}])
sink.write_report(folder / "report.html")
sink.close()
"""


def test_trackio_itself_keeps_tables_and_the_report(tmp_path: Path) -> None:
    if find_spec("trackio") is None:
        pytest.skip("the extra trackio is not installed")
    (tmp_path / "report.html").write_text("the page")
    # It reads its folder from the environment when it is imported.
    places = {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TRACKIO_RUN, str(tmp_path)]
    subprocess.run(command, env=os.environ | places, check=True, timeout=600, capture_output=True)
    kept = b"".join(path.read_bytes() for path in (tmp_path / "trackio").rglob("*") if path.is_file())
    assert b"trackio.table" in kept
    assert b"the page" in kept
