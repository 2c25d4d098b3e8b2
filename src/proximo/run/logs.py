"""Writes each step's line to metrics.jsonl, its samples to samples.jsonl, and both to every sink."""

from collections.abc import Mapping, Sequence
from typing import Any

from proximo.checkpoint.logs import JsonLines
from proximo.checkpoint.run_folder import METRICS, SAMPLES, RunFolder
from proximo.config.run import RunConfig
from proximo.metrics.alarm_watch import AlarmWatch
from proximo.metrics.catalogue import Recorder
from proximo.metrics.console import ProgressInfo, ProgressView
from proximo.metrics.sinks import Sink
from proximo.metrics.tensorboard_sink import TensorBoardSink
from proximo.metrics.values import Last, Sum
from proximo.run.sinks import failures_of, open_sinks
from proximo.run.task import Record


class Logs:
    """Writes metrics and samples of each step to files and to every sink, including the one that raises alarms."""

    def __init__(
        self,
        folder: RunFolder,
        progress: ProgressView,
        run: RunConfig,
        settings: Mapping[str, Any],
        *,
        info: ProgressInfo,
    ) -> None:
        self.progress = progress
        watch = AlarmWatch(info, settings, metrics_file=folder.metrics, report=progress.warn)
        self.files: list[Sink] = [watch]
        if run.tensorboard:
            self.files.append(TensorBoardSink(folder.tensorboard, folder.metrics))
        self.trackers = open_sinks(
            run, settings, folder=folder.trackers, metrics_file=folder.metrics, warn=progress.warn
        )
        self._failures_told = 0
        self.metrics = JsonLines(folder.metrics)
        self.samples = JsonLines(folder.samples)

    def write(self, step: int, records: Sequence[Record]) -> dict[str, float]:
        recorder = Recorder()
        recorder.record("progress/step", Last(step))
        failures = failures_of(self.trackers)
        if failures > self._failures_told:
            recorder.record("progress/sink_failures", Sum(failures - self._failures_told))
            self._failures_told = failures
        for record in records:
            recorder.record_all(record.metrics)
            for sample in record.samples:
                self.samples.append({"step": step, **sample})
        line = recorder.line()
        if recorder.non_finite:
            self.progress.warn(f"step {step}: not finite: {', '.join(recorder.non_finite)}")
        self.metrics.append({"step": step, **line})
        for sink in (self.progress, *self.files, *self.trackers):
            sink.write(step, line)
        samples = [sample for record in records for sample in record.samples]
        for tracker in self.trackers:
            tracker.write_samples(step, samples)
        return line

    @property
    def num_lines(self) -> dict[str, int]:
        """File name -> number of lines written."""
        return {METRICS: self.metrics.num_lines, SAMPLES: self.samples.num_lines}

    def sync(self) -> None:
        """Flush the lines to disk, before a checkpoint of their steps is saved."""
        self.metrics.sync()
        self.samples.sync()

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, *_: object) -> None:
        self.metrics.close()
        self.samples.close()
        for sink in (*self.files, *self.trackers):
            sink.close()
