"""The interface of sinks, which take the metrics of every step. Sinks: tensorboard_sink.py, trackers.py."""

import json
from collections.abc import Iterator, Mapping, Sequence
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
