"""Sinks for experiment trackers, thin skins over their packages. Not what happens when one fails: run/sinks.py.

A package is imported when its sink is opened, and nowhere else.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from proximo.errors import redacted

OWN_ID = "proximo.id"
"""The tag by which a resumed run finds itself in MLflow, which gives its runs ids of its own."""
LONGEST_PARAMETER = 500
PARAMETERS_AT_ONCE = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What a tracker is told of the run when its sink is opened."""

    id: str
    """32 hexadecimal digits, the same for every process that goes on with the run."""
    name: str
    folder: Path
    """For files of the tracker; removed with the run that is replaced."""
    config: Mapping[str, Any]
    """Every setting of the recipe, nested, as JSON has it."""


def wandb_problem(mode: str) -> str | None:
    """Why Weights & Biases would take nothing, or ask at the terminal; None where that is not known."""
    if mode == "offline" or import_module("wandb").login(prompt=False, verify=False):
        return None
    return "nobody is logged in: say `wandb login`, set WANDB_API_KEY, or give the sink mode: offline"


def mlflow_problem(tracking_uri: str | None) -> str | None:
    """Why MLflow refuses the address; None where it does not. Asks no server; a database that is not there is made."""
    try:
        import_module("mlflow.tracking").MlflowClient(tracking_uri=tracking_uri)
    except Exception as error:  # whatever the packages below it raise
        given = "its default address" if tracking_uri is None else f"tracking_uri {redacted(tracking_uri)}"
        said = redacted(str(error)).partition("\n")[0][:300]
        return f"MLflow refuses {given} ({said}); a server (http://...) or a database (sqlite:///mlflow.db) will do"
    return None


def trackio_problem(space_id: str | None) -> str | None:
    """Why Trackio could show nothing; None where that is not known."""
    if space_id is None or import_module("huggingface_hub").get_token():
        return None
    return f"the Space {space_id} is on the Hub, and there is no token: say `hf auth login`, or set HF_TOKEN"


class WandbSink:
    """A run of Weights & Biases, known by its id: a resumed one goes on in it."""

    def __init__(self, run: TrackedRun, *, project: str, entity: str | None, mode: str) -> None:
        wandb = import_module("wandb")
        self._run = wandb.init(
            project=project,
            entity=entity,
            mode=mode,
            id=run.id,
            name=run.name,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),  # the run's own progress has the terminal
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns = list(dict.fromkeys(name for row in samples for name in row))
        rows = [[_cell(row.get(name)) for name in columns] for row in samples]
        table = import_module("wandb").Table(columns=columns, data=rows)
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """A run of Trackio, which knows its runs by name: the name carries the beginning of the id."""

    def __init__(self, run: TrackedRun, *, project: str, space_id: str | None) -> None:
        self._run = import_module("trackio").init(
            project=project,
            space_id=space_id,
            name=f"{run.name}-{run.id[:8]}",
            resume="allow",
            config=dict(run.config),
            embed=False,
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflowSink:
    """A run of MLflow, found again by a tag with the id. A client of its own: no global state of the package is set."""

    def __init__(self, run: TrackedRun, *, experiment: str, tracking_uri: str | None) -> None:
        entities = import_module("mlflow.entities")
        self._metric = entities.Metric
        self._client = import_module("mlflow.tracking").MlflowClient(tracking_uri=tracking_uri)
        known = self._client.get_experiment_by_name(experiment)
        experiment_id = self._client.create_experiment(experiment) if known is None else known.experiment_id
        found = self._client.search_runs([experiment_id], f"tags.`{OWN_ID}` = '{run.id}'")
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        created = self._client.create_run(experiment_id, tags={OWN_ID: run.id}, run_name=run.name)
        self._run_id = created.info.run_id
        parameters = [entities.Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in _leaves(run.config)]
        for start in range(0, len(parameters), PARAMETERS_AT_ONCE):
            self._client.log_batch(self._run_id, params=parameters[start : start + PARAMETERS_AT_ONCE])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        batch = [self._metric(name, number, now, step) for name, number in metrics.items()]
        self._client.log_batch(self._run_id, metrics=batch)

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in samples)
        self._client.log_text(self._run_id, lines, f"samples/step-{step:06}.jsonl")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _cell(value: Any) -> Any:
    """Of a column that has one type: what is no text and no number as JSON."""
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)


def _leaves(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
