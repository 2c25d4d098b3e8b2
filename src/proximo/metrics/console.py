"""Shows the progress of a run: a live view on a terminal or in a notebook, plain lines elsewhere, or only warnings."""

import errno
import logging
import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from proximo.errors import redacted
from proximo.message_text import format_duration, format_number, with_addresses
from proximo.metrics.catalogue import catalogue
from proximo.trainer_kinds import TrainerKind

SKIPPED_UPDATES = "/skipped_updates"
"""End of the names of metrics that count skipped updates."""
Clock = Callable[[], float]
FRAMES_PER_SECOND = 4
"""Of a view that is redrawn in place."""


class ProgressView:
    """A sink that shows metrics to a person, and also phases, notes and warnings.

    By itself it is the view of `--quiet`, which shows only warnings.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._warned: set[str] = set()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step."""

    def phase(self, name: str) -> None:
        """Show the current phase of a step, such as "rollout" or "evaluation"."""

    def note(self, message: str) -> None:
        """Show a permanent line."""

    def warn(self, message: str) -> None:
        """Show a permanent warning. The same text is shown only once."""
        if message not in self._warned:
            self._warned.add(message)
            self._print(f"warning: {message}")

    def close(self) -> None:
        """Stop updating. The last numbers stay visible."""

    def _print(self, message: str) -> None:
        self._console.print(with_addresses(redacted(message)), markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressInfo:
    """The trainer and the step range of a run, as a progress view needs them."""

    trainer: TrainerKind
    total_steps: int
    first_step: int = 0
    """Steps that earlier processes finished; 0 unless the run is resumed."""
    clock: Clock = time.monotonic

    def watched(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """Label and formatted number of each watched metric. Counts of what went wrong appear only above 0."""
        labels = self.trainer.metrics.watched
        return [
            (labels[name], _shown(name, metrics[name]))
            for name in labels
            if name in metrics and (metrics[name] or not name.endswith(SKIPPED_UPDATES))
        ]

    def label(self, step: int) -> str:
        return f"step {step}/{self.total_steps}"

    def seconds_left(self, step: int, started: float) -> float | None:
        """Estimated seconds to the end of the run, from the mean step time of this process; None before its first step.

        `started`: time of the clock when its first step began.
        """
        done = step - self.first_step
        if done <= 0:
            return None
        return (self.clock() - started) / done * (self.total_steps - step)


def open_progress(info: ProgressInfo, *, console: Console | None = None, quiet: bool = False) -> ProgressView:
    """A live view if the console is a terminal or in a notebook, else one line per step."""
    console = console or _ResilientConsole(stderr=True)
    if quiet:
        return ProgressView(console)
    if console.is_jupyter:
        return NotebookProgress(info, console)
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalProgress(info, console)
    return PlainProgress(info, console)


class _ResilientConsole(Console):
    """A console that stops writing when its pipe or terminal is closed, so that the run continues.

    rich handles a broken pipe; a closed terminal raises OSError with EIO.
    """

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        try:
            super().__exit__(exc_type, exc_value, traceback)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True


class PlainProgress(ProgressView):
    """One line per step, for log files and pipes, and one for each phase when it first begins: it may take long."""

    def __init__(self, info: ProgressInfo, console: Console) -> None:
        super().__init__(console)
        self._info = info
        self._started = info.clock()
        self._next = info.first_step + 1 if info.first_step else 0
        """The step that phases belong to; 0 is the evaluation before training."""
        self._phases: set[str] = set()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._info.first_step:  # an evaluation before training is not a step
            self._started = self._info.clock()
        self._next = min(step + 1, self._info.total_steps)
        numbers = self._info.watched(metrics)
        if step == 0 and not numbers:  # nothing was evaluated
            return
        left = self._info.seconds_left(step, self._started)
        remaining = [f"{format_duration(left)} left"] if left else []
        self._print("  ".join([self._info.label(step), *map(" ".join, numbers), *remaining]))

    def phase(self, name: str) -> None:
        if name not in self._phases:
            self._phases.add(name)
            self._print(f"{self._info.label(self._next)}: {name}")

    def note(self, message: str) -> None:
        self._print(message)


class LoggedProgress(PlainProgress):
    """Appends plain lines to a log file, and forwards to another view.

    A resumed run appends to the same file, so it holds the output of every process, including steps that were redone.
    """

    def __init__(self, info: ProgressInfo, log: Path, view: ProgressView) -> None:
        self._view = view
        self._file = log.open("a", encoding="utf-8", buffering=1)
        # In a notebook rich would show the lines in the cell and leave the file empty.
        super().__init__(info, Console(file=self._file, force_terminal=False, force_jupyter=False, color_system=None))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        super().write(step, metrics)
        self._view.write(step, metrics)

    def phase(self, name: str) -> None:
        """Show the phase, which the log leaves out."""
        self._view.phase(name)

    def note(self, message: str) -> None:
        super().note(message)
        self._view.note(message)

    def warn(self, message: str) -> None:
        super().warn(message)
        self._view.warn(message)

    def log_only(self, text: str) -> None:
        """Write to the log file only."""
        with suppress(OSError):  # the disk may be full, which may be what `text` reports
            self._file.write(redacted(text))

    def close(self) -> None:
        self._view.close()
        self._file.close()


class TerminalProgress(ProgressView):
    """A progress bar, the current phase and the watched metrics, redrawn in place.

    Notes, warnings and all output to stdout and stderr scroll above it.
    """

    def __init__(self, info: ProgressInfo, console: Console) -> None:
        super().__init__(console)
        self._info = info
        self._started = info.clock()
        self._numbers: dict[str, float] = {}
        self._bar = Progress(
            SpinnerColumn(finished_text="[green]done[/]"),
            TextColumn("{task.fields[label]}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[left]}", style="cyan", markup=False),
            TextColumn("{task.description}", style="dim", markup=False),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task(
            "starting",
            total=info.total_steps,
            completed=info.first_step,
            label=info.label(info.first_step),
            left="",
        )
        self._start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        watched = self._info.trainer.metrics.watched
        self._numbers |= {name: number for name, number in metrics.items() if name in watched}
        if step == self._info.first_step:  # an evaluation before training is not a step
            self._started = self._info.clock()
        left = self._info.seconds_left(step, self._started)
        self._bar.update(
            self._task,
            completed=step,
            label=self._info.label(step),
            left=f"{format_duration(left)} left" if left else "",
            description="",
        )

    def phase(self, name: str) -> None:
        self._bar.update(self._task, description=name)

    def note(self, message: str) -> None:
        self._print(message)

    def close(self) -> None:
        self._bar.update(self._task, description="")
        self._stop()

    def _start(self) -> None:
        self._live = Live(get_renderable=self._view, console=self._console, refresh_per_second=FRAMES_PER_SECOND)
        self._live.start()

    def _stop(self) -> None:
        self._live.stop()

    def _view(self) -> Group:
        shown = self._info.watched(self._numbers)
        width = max(1, self._console.width // 15)
        numbers = Table.grid(padding=(0, 2))
        for start in range(0, len(shown), width):
            numbers.add_row(*(_number(*pair) for pair in shown[start : start + width]))
        return Group(self._bar, numbers)


class NotebookProgress(TerminalProgress, JupyterMixin):
    """The same as an output of the running cell that is replaced in place, at most four times a second.

    `Live` of rich would need ipywidgets there.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        super().write(step, metrics)
        self._draw()

    def phase(self, name: str) -> None:
        super().phase(name)
        self._draw()

    def __rich__(self) -> RenderableType:
        return self._view()

    def _start(self) -> None:
        self._drawn_at = -math.inf
        self._output: Any = import_module("IPython.display").display(self, display_id=True)

    def _draw(self) -> None:
        if self._info.clock() - self._drawn_at >= 1 / FRAMES_PER_SECOND:
            self._stop()

    def _stop(self) -> None:
        self._drawn_at = self._info.clock()
        self._output.update(self)


def _shown(name: str, number: float) -> str:
    return format_number(number, catalogue().find(name).unit)


def _number(label: str, number: str) -> Text:
    return Text.assemble((f"{label} ", "dim"), (number, "bold"))


class _Notes(logging.Handler):
    """Turns log records into lines or phases of the progress view."""

    def __init__(self, progress: ProgressView) -> None:
        super().__init__(logging.INFO)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        show = self._progress.phase if getattr(record, "phase", False) else self._progress.note
        show(record.getMessage())


@contextmanager
def progress_messages(progress: ProgressView) -> Generator[None]:
    """Inside, log messages (for example what the run waits for) go to the progress view and to log.txt."""
    notes = _Notes(progress)
    logs = [logging.getLogger(package) for package in ("proximo", "proximo_verifiers")]
    levels = [log.level for log in logs]
    for log in logs:
        log.addHandler(notes)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
            log.removeHandler(notes)
