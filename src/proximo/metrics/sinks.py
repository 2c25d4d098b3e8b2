"""Sinks, which take the metrics of every step: their interface, and that of Weights & Biases.

The tracker's package is imported only when its sink is opened or checked. Failures are handled by run/sinks.py. The
files of TensorBoard: tensorboard_sink.py.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


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


def history(metrics_file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Step and metrics of each line of metrics.jsonl; nothing if there is no such file."""
    if not metrics_file.exists():
        return
    with metrics_file.open(encoding="utf-8") as lines:
        for line in lines:
            metrics = json.loads(line)
            yield metrics.pop("step"), metrics


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

    def close(self) -> None:
        self._run.finish()


def _table(samples: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """The columns, and the cells of each row."""
    columns = list(dict.fromkeys(name for row in samples for name in row))
    return columns, [[_cell(row.get(name)) for name in columns] for row in samples]


def _cell(value: Any) -> Any:
    """A table cell. Values other than strings and numbers become JSON, since a column must have one type."""
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)
