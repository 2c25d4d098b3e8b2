"""Sinks, which take the metrics of every step: their interface, and those of Weights & Biases, Trackio and MLflow.

A tracker's package is imported only when its sink is opened or checked. Failures are handled by run/sinks.py. The
files of TensorBoard: tensorboard_sink.py.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from proximo.errors import redacted


class Sink(Protocol):
    """Receives the metrics of every step, once and in order."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        ...

    def close(self) -> None:
        """Flush and release resources. No write follows."""
        ...


@runtime_checkable
class SampleSink(Protocol):
    """A sink that also receives samples, after the metrics of their step."""

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows of samples.jsonl of one step, at least one."""
        ...


@runtime_checkable
class ReportSink(Protocol):
    """A sink that also receives the report at the end of a run that finished or failed."""

    def write_report(self, page: Path) -> None:
        """Take report.html, which exists. No write of metrics or samples follows."""
        ...


def history(metrics_file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Step and metrics of each line of metrics.jsonl; nothing if there is no such file."""
    if not metrics_file.exists():
        return
    with metrics_file.open(encoding="utf-8") as lines:
        for line in lines:
            metrics = json.loads(line)
            yield metrics.pop("step"), metrics


MLFLOW_ADDRESS = "MLFLOW_TRACKING_URI"
"""The environment variable with the server or database of MLflow."""
SPACE = "TRACKIO_SPACE_ID"
"""The environment variable with the Space on the Hugging Face Hub that shows the runs of Trackio."""
RUN_ID_TAG = "proximo.id"
"""The tag by which a resumed run is found in MLflow, which assigns its own run ids."""
MAX_PARAMETER_CHARACTERS = 500
PARAMETERS_PER_BATCH = 100
TRAINING = "train"
"""The kind of the samples of training steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """The facts about a run that a tracker needs when its sink is opened."""

    id: str
    """32 hexadecimal digits, the same for every process that resumes the run."""
    name: str
    folder: Path
    """Folder for the tracker's files, inside the run folder."""
    config: Mapping[str, Any]
    """All settings of the recipe, as nested JSON values."""


class WandbSink:
    """A run of Weights & Biases. A resumed run continues under the same id."""

    @staticmethod
    def problem() -> str | None:
        """Why it would refuse the run or prompt for a login; None if no problem is known."""
        if os.environ.get("WANDB_MODE", "online") != "online":
            return None
        if import_module("wandb").login(prompt=False, verify=False):
            return None
        return "nobody is logged in: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"

    def __init__(self, run: TrackedRun, *, project: str) -> None:
        wandb = import_module("wandb")
        self._id = run.id
        self._run = wandb.init(
            project=project,
            id=run.id,
            name=run.name,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),  # the progress view owns the terminal
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = _table(samples)
        self._run.log({"samples": import_module("wandb").Table(columns=columns, data=rows)}, step=step)

    def write_report(self, page: Path) -> None:
        artifact = import_module("wandb").Artifact(f"report-{self._id}", type="report")
        artifact.add_file(str(page))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """A run of Trackio, which identifies runs by name, so the name contains the start of the id."""

    @staticmethod
    def problem() -> str | None:
        """Why it could not show the run; None if no problem is known."""
        space_id = os.environ.get(SPACE)
        if space_id is None or import_module("huggingface_hub").get_token():
            return None
        return (
            f"the Space {space_id} ({SPACE}) is on the Hub, and there is no token: run `hf auth login`, or set HF_TOKEN"
        )

    def __init__(self, run: TrackedRun, *, project: str) -> None:
        self._id = run.id
        self._run = import_module("trackio").init(
            project=project,
            space_id=os.environ.get(SPACE),
            name=f"{run.name}-{run.id[:8]}",
            resume="allow",
            config=dict(run.config),
            embed=False,
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = _table(samples)
        self._run.log({"samples": import_module("trackio").Table(columns=columns, data=rows)}, step=step)

    def write_report(self, page: Path) -> None:
        self._run.log_artifact(page, name=f"report-{self._id[:8]}", type="report")

    def close(self) -> None:
        self._run.finish()


class MLflowSink:
    """A run of MLflow. A resumed run is found by a tag with its id. Uses a client object, not MLflow's global state."""

    @staticmethod
    def problem() -> str | None:
        """Why it refuses its address, or None. Contacts no server, but creates a database that does not exist."""
        try:
            import_module("mlflow.tracking").MlflowClient()
        except Exception as error:  # MLflow's dependencies raise all kinds of errors
            given = os.environ.get(MLFLOW_ADDRESS)
            address = "its default address" if given is None else f"{MLFLOW_ADDRESS} {redacted(given)}"
            reason = redacted(str(error)).partition("\n")[0][:300]
            return f"MLflow refuses {address} ({reason}); use a server (http://...) or a database (sqlite:///x.db)"
        return None

    def __init__(self, run: TrackedRun, *, project: str) -> None:
        entities = import_module("mlflow.entities")
        self._metric = entities.Metric
        self._client = import_module("mlflow.tracking").MlflowClient()
        existing = self._client.get_experiment_by_name(project)
        experiment_id = self._client.create_experiment(project) if existing is None else existing.experiment_id
        runs = self._client.search_runs([experiment_id], f"tags.`{RUN_ID_TAG}` = '{run.id}'")
        if runs:
            self._run_id = runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        created = self._client.create_run(experiment_id, tags={RUN_ID_TAG: run.id}, run_name=run.name)
        self._run_id = created.info.run_id
        parameters = [entities.Param(key, str(value)[:MAX_PARAMETER_CHARACTERS]) for key, value in _leaves(run.config)]
        for start in range(0, len(parameters), PARAMETERS_PER_BATCH):
            self._client.log_batch(self._run_id, params=parameters[start : start + PARAMETERS_PER_BATCH])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        batch = [self._metric(name, number, now, step) for name, number in metrics.items()]
        self._client.log_batch(self._run_id, metrics=batch)

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Held-out rows go to one growing table per kind, which MLflow shows and compares; it makes tables with pandas.

        Rows of training, which are many, go to a file per step: adding to a table sends all of it again, and the tag
        in which MLflow lists tables has room for about a hundred.
        """
        kinds = dict.fromkeys(row["kind"] for row in samples if row.get("kind", TRAINING) != TRAINING)
        tables = list(kinds) if find_spec("pandas") else []
        for kind in tables:
            columns, rows = _table([{"step": step, **row} for row in samples if row.get("kind") == kind])
            data = {name: [row[index] for row in rows] for index, name in enumerate(columns)}
            self._client.log_table(self._run_id, data, f"samples/{kind}.json")
        lines = "".join(json.dumps(row) + "\n" for row in samples if row.get("kind") not in tables)
        if lines:
            self._client.log_text(self._run_id, lines, f"samples/step-{step:06}.jsonl")

    def write_report(self, page: Path) -> None:
        self._client.log_artifact(self._run_id, str(page))

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _table(samples: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """The columns, and the cells of each row."""
    columns = list(dict.fromkeys(name for row in samples for name in row))
    return columns, [[_cell(row.get(name)) for name in columns] for row in samples]


def _cell(value: Any) -> Any:
    """A table cell. Values other than strings and numbers become JSON, since a column must have one type."""
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


TRACKERS: dict[str, type[WandbSink | MLflowSink | TrackioSink]] = {
    "wandb": WandbSink,
    "mlflow": MLflowSink,
    "trackio": TrackioSink,
}
"""Kind of a sink -> its class. `problem` says before a run what would fail."""
