"""The journal of a run: what it writes to its folder and shows on the console. Only rank 0 writes one.

If rank 0 was killed, its launcher or another rank writes the outcome (`write_outcome_of_lost`).
"""

import traceback
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from proximo.checkpoint.logs import JsonLines, cut_back
from proximo.checkpoint.run_folder import (
    LOG,
    METRICS,
    OUTCOME,
    REPORT,
    SAMPLES,
    TENSORBOARD,
    TRACKERS,
    EndState,
    RunFolder,
    open_abandoned,
)
from proximo.config.recipe import TrainerRecipe
from proximo.config.run import RunConfig
from proximo.errors import ProximoError, redacted
from proximo.message_text import count_of
from proximo.metrics.catalogue import step_line
from proximo.metrics.console import LoggedProgress, ProgressInfo, ProgressView, open_progress, progress_messages
from proximo.metrics.report.page import write_report
from proximo.metrics.report.views import run_alarms, without_update
from proximo.metrics.run_files import read_run
from proximo.metrics.sinks import Sink
from proximo.metrics.tensorboard_sink import TensorBoardSink
from proximo.metrics.values import Last, Sum
from proximo.run.model_card import write_final_cards
from proximo.run.options import RunOptions
from proximo.run.pushes import Pushes
from proximo.run.sinks import AlarmWatch, open_sinks
from proximo.run.task import Record


class Journal:
    """The journal of a run since its start or resume."""

    def __init__(
        self,
        folder: RunFolder,
        info: ProgressInfo,
        recipe: TrainerRecipe,
        options: RunOptions,
        *,
        resolved: Mapping[str, Any],
        environment: Mapping[str, Any],
        num_log_lines: Mapping[str, int],
    ) -> None:
        """`num_log_lines`: lines of each log at the save of the checkpoint that the run resumes from."""
        self._folder = folder
        self._info = info
        self._run = recipe.run
        self._resolved = resolved
        (folder.path / OUTCOME).unlink(missing_ok=True)
        folder.write_config(options.recipe_text, resolved)
        folder.write_environment(environment)
        self._lost_lines = list(_cut_logs_back(folder, self._run.folder, info.first_step, num_log_lines))
        self.progress = LoggedProgress(info, folder.path / LOG, open_progress(info, quiet=options.quiet))
        self.pushes = pushes_of(recipe.run, folder, self.progress)
        self._opened = ExitStack()
        self._failures_told: Counter[str] = Counter()

    def begin(self, *, notes: Sequence[str], log_only: str | None) -> None:
        """Show the notes of the start, and open logs and sinks; `log_only` goes to the log file alone."""
        if log_only is not None:
            self.progress.log_only(f"{log_only}\n")
        for note in notes:
            self.progress.note(note)
        for warning in self._lost_lines:
            self.progress.warn(warning)
        self._opened.enter_context(progress_warnings(self.progress))
        self._opened.enter_context(progress_messages(self.progress))
        folder, lines = self._folder.path, self._folder.path / METRICS
        self._sinks: list[Sink] = [
            self.progress,
            AlarmWatch(self._info, self._resolved, metrics_file=lines, report=self.progress.warn),
        ]
        if self._run.tensorboard:
            self._sinks.append(TensorBoardSink(folder / TENSORBOARD, lines))
        self._trackers = open_sinks(
            self._run, self._resolved, folder=folder / TRACKERS, metrics_file=lines, warn=self.progress.warn
        )
        self._logs = {name: JsonLines(folder / name) for name in (METRICS, SAMPLES)}
        for each in (*self._trackers[::-1], *self._sinks[:0:-1], *self._logs.values()):
            self._opened.callback(each.close)

    @property
    def num_log_lines(self) -> dict[str, int]:
        """File name -> number of lines written."""
        return {name: log.num_lines for name, log in self._logs.items()}

    def write(self, step: int, records: Sequence[Record]) -> dict[str, float]:
        """Write the line of a step and its samples to all files and sinks; returns the line."""
        samples = [sample for record in records for sample in record.samples]
        for sample in samples:
            self._logs[SAMPLES].append({"step": step, **sample})
        own = {"progress/step": Last(step), **self._new_failures()}
        line, non_finite = step_line(own, *(record.metrics for record in records))
        if non_finite:
            self.progress.warn(f"step {step}: not finite: {', '.join(non_finite)}")
        self._logs[METRICS].append({"step": step, **line})
        for sink in (*self._sinks, *self._trackers):
            sink.write(step, line)
        for tracker in self._trackers:
            tracker.write_samples(step, samples)
        return line

    def _new_failures(self) -> dict[str, Sum]:
        """The failures of sinks and pushes since the last line, by the name of their metric."""
        failures = Counter({"progress/sink_failures": sum(tracker.num_failures for tracker in self._trackers)})
        if self.pushes is not None:
            self.pushes.look()
            failures["progress/push_failures"] = self.pushes.num_failures
        new, self._failures_told = failures - self._failures_told, failures
        return {name: Sum(count) for name, count in new.items()}

    def sync(self) -> None:
        """Flush the lines to disk, before a checkpoint of their steps is saved."""
        for log in self._logs.values():
            log.sync()

    def fail(self, error: Exception) -> None:
        """Write the error that ended the run."""
        self.progress.log_only("".join(traceback.format_exception(error)))
        with suppress(Exception):  # for example a full disk: report what ended the run instead
            self.end("failed", reason=_reason(error))

    def is_stuck(self, reason: str) -> None:
        """Write the outcome of a run whose main thread hangs; another thread calls it."""
        with suppress(Exception):
            self._folder.write_outcome("failed", total_steps=self._info.total_steps, reason=" ".join(reason.split()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        """Close metrics, samples and log."""
        self._opened.close()
        if self.pushes is not None:
            self.pushes.close()
        self.progress.close()

    def end(self, state: EndState, *, reason: str | None = None) -> None:
        """Write the outcome, and the report unless the run is to be resumed. `reason`: the signal that stopped it."""
        total = self._info.total_steps
        with self._opened:
            if state == "finished":
                write_final_cards(self._folder.path)
                reason = without_update(read_run(self._folder.path))
            self._folder.write_outcome(state, total_steps=total, reason=reason)
            if state == "stopped":
                return
            self.progress.phase("report")
            page = write_report(self._folder.path)
        steps = f": {count_of(total, 'step')}" if state == "finished" else ""
        steps += f", but {reason.removesuffix('.')}" if state == "finished" and reason else ""
        report = shown(self._folder, self._run.folder, page)
        self.progress.note(f"{state}{steps}, report in {report}")
        for alarm in run_alarms(read_run(self._folder.path)):
            self.progress.note(f"{alarm.severity}: {alarm.text}")


def pushes_of(run: RunConfig, folder: RunFolder, progress: ProgressView) -> Pushes | None:
    """The pushes of a run; None without `run.push`."""
    if run.push is None:
        return None
    return Pushes(run.push, folder.path, warn=progress.warn, note=progress.note)


def finish_interrupted_end(folder: RunFolder, *, total_steps: int) -> None:
    """Finish what a crash after the last checkpoint left undone: model cards, outcome and report."""
    write_final_cards(folder.path)
    if not (folder.path / OUTCOME).is_file():
        folder.write_outcome("finished", total_steps=total_steps, reason=without_update(read_run(folder.path)))
    report, metrics = folder.path / REPORT, folder.path / METRICS
    if not report.is_file() or report.stat().st_mtime < metrics.stat().st_mtime:
        write_report(folder.path)


def shown(folder: RunFolder, spelled: str, path: Path) -> Path:
    """A path inside the run folder, written as in the recipe."""
    return Path(spelled, path.relative_to(folder.path))


def _cut_logs_back(folder: RunFolder, spelled: str, step: int, num_lines: Mapping[str, int]) -> Iterator[str]:
    """Cut each log back to `step`; yields a warning for each log that has lost lines since the checkpoint."""
    for log in (folder.path / METRICS, folder.path / SAMPLES):
        found, saved = cut_back(log, step if folder.resuming else -1), num_lines.get(log.name, 0)
        if found != saved:
            yield (
                f"{shown(folder, spelled, log)} has {found} lines up to step {step}, and had {saved} when the "
                "checkpoint was saved: it was changed since. The training continues with the same bits; curves and "
                "report show the rest"
            )


def _reason(error: Exception) -> str:
    """One line. Proximo's own errors explain themselves; others are prefixed with their type."""
    words = " ".join(str(error).split())
    return words if isinstance(error, ProximoError) and words else f"{type(error).__name__}: {words}".rstrip(": ")


def write_outcome_of_lost(folder: Path, *, by: str, reason: str) -> None:
    """Write outcome, report and the last lines of the log of a run that a process `by` (`process 4711 on node1`) led.

    Does nothing if that process began no run in the folder, the run has an outcome, or the disk refuses.
    """
    opened = open_abandoned(folder, by=by)
    if opened is None:
        return
    reason = " ".join(redacted(reason).split())
    with opened, suppress(OSError):
        opened.write_outcome("failed", total_steps=read_run(opened.path).total_steps or 0, reason=reason)
        page = write_report(opened.path)
        with (opened.path / LOG).open("a", encoding="utf-8") as log:
            log.write(f"{reason}\nfailed, report in {folder / page.name}\n")


@contextmanager
def progress_warnings(progress: ProgressView) -> Generator[None]:
    """Inside, the progress view shows Python warnings, which would otherwise be printed over it."""

    def show(  # noqa: PLR0917  (the signature is Python's)
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        del category, filename, lineno, file, line
        progress.warn(str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show  # ty: ignore[invalid-assignment]
        yield
