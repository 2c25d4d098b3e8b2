"""Shows the progress of a run: a live view on a terminal or in a notebook, plain lines elsewhere, or only warnings."""

import errno
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from proximo.errors import redacted
from proximo.metrics.catalogue import catalogue
from proximo.metrics.formatting import format_duration, format_number
from proximo.metrics.notebook.display import Pace, UpdatedCell
from proximo.metrics.notebook.html import Number, progress_html
from proximo.pages import with_addresses
from proximo.trainer_kinds import TrainerKind

SKIPPED_UPDATES = "/skipped_updates"
"""End of the names of metrics that count skipped updates."""
Clock = Callable[[], float]
NOTES_SHOWN = 40
"""How many of the latest notes and warnings a notebook shows; log.txt has all."""


class ProgressView(Protocol):
    """A sink that shows metrics to a person, and also phases, notes and warnings."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step."""
        ...

    def phase(self, name: str) -> None:
        """Show the current phase of a step, such as "rollout" or "evaluation"."""
        ...

    def note(self, message: str) -> None:
        """Show a permanent line."""
        ...

    def warn(self, message: str) -> None:
        """Show a permanent warning. The same text is shown only once."""
        ...

    def close(self) -> None:
        """Stop updating. The last numbers stay visible."""
        ...


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

        `started`: time of the clock when the process started.
        """
        done = step - self.first_step
        if done <= 0:
            return None
        return (self.clock() - started) / done * (self.total_steps - step)


def open_progress(
    info: ProgressInfo, *, console: Console | None = None, quiet: bool = False, every_seconds: float = 0.0
) -> ProgressView:
    """A live view if the console is a terminal or in a notebook, else one line per step.

    `every_seconds`: show at most one line in so many seconds.
    """
    console = console or _ResilientConsole(stderr=True)
    if quiet:
        return QuietProgress(console)
    if console.is_jupyter:
        return NotebookProgress(info)
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalProgress(info, console)
    return PlainProgress(info, console, every_seconds=every_seconds)


class _ResilientConsole(Console):
    """A console that goes quiet when its pipe or terminal is closed, so that the run goes on.

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


class QuietProgress:
    """The view of `--quiet`: shows only warnings."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._warned: set[str] = set()

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def phase(self, name: str) -> None: ...

    def note(self, message: str) -> None: ...

    def warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            _print(self._console, f"warning: {message}")

    def close(self) -> None: ...


class PlainProgress:
    """One line per step, for log files and pipes. The first and the last step are always shown, and before the first
    and after the last one what it is doing, since it may take long.
    """

    def __init__(self, info: ProgressInfo, console: Console, *, every_seconds: float = 0.0) -> None:
        self._info = info
        self._console = console
        self._every_seconds = every_seconds
        self._quiet = QuietProgress(console)
        self._started = info.clock()
        self._last_shown: float | None = None
        self._waiting_for: int | None = info.first_step + 1 if info.first_step else 0
        """The step whose phases are shown; 0 is the evaluation before training. None between the first and the last."""
        self._phases: set[str] = set()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        begins, ends = step == self._info.first_step, step == self._info.total_steps
        self._waiting_for = step if ends else step + 1 if begins else None
        numbers = self._info.watched(metrics)
        if step == 0 and not numbers:  # nothing was evaluated
            return
        now = self._info.clock()
        due = self._last_shown is None or now - self._last_shown >= self._every_seconds
        if not due and step < self._info.total_steps:
            return
        self._last_shown = now
        left = self._info.seconds_left(step, self._started)
        remaining = [f"{format_duration(left)} left"] if left else []
        _print(self._console, "  ".join([self._info.label(step), *map(" ".join, numbers), *remaining]))

    def phase(self, name: str) -> None:
        if self._waiting_for is None or name in self._phases:
            return
        self._phases.add(name)
        _print(self._console, f"{self._info.label(self._waiting_for)}: {name}")

    def note(self, message: str) -> None:
        _print(self._console, message)

    def warn(self, message: str) -> None:
        self._quiet.warn(message)

    def close(self) -> None: ...


class LoggedProgress:
    """Forwards to another view and appends plain lines to a log file.

    A resumed run appends to the same file, so it holds the output of every process, including steps that were redone.
    """

    def __init__(self, info: ProgressInfo, log: Path, view: ProgressView) -> None:
        self._view = view
        self._file = log.open("a", encoding="utf-8", buffering=1)
        self._log = PlainProgress(info, _file_console(self._file))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log.write(step, metrics)
        self._view.write(step, metrics)

    def phase(self, name: str) -> None:
        self._view.phase(name)

    def note(self, message: str) -> None:
        self._log.note(message)
        self._view.note(message)

    def warn(self, message: str) -> None:
        self._log.warn(message)
        self._view.warn(message)

    def log_only(self, text: str) -> None:
        """Write to the log file only."""
        with suppress(OSError):  # the disk may be full, which may be what `text` reports
            self._file.write(redacted(text))

    def close(self) -> None:
        self._view.close()
        self._file.close()


class TerminalProgress:
    """A progress bar, the current phase and the watched metrics, redrawn in place.

    Notes, warnings and all output to stdout and stderr scroll above it.
    """

    def __init__(self, info: ProgressInfo, console: Console) -> None:
        self._info = info
        self._quiet = QuietProgress(console)
        self._console = console
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
        self._live = Live(get_renderable=self._view, console=console, refresh_per_second=4)
        self._live.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        watched = self._info.trainer.metrics.watched
        self._numbers |= {name: number for name, number in metrics.items() if name in watched}
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
        _print(self._console, message)

    def warn(self, message: str) -> None:
        self._quiet.warn(message)

    def close(self) -> None:
        self._bar.update(self._task, description="")
        self._live.stop()

    def _view(self) -> Group:
        shown = self._info.watched(self._numbers)
        width = max(1, self._console.width // 15)
        numbers = Table.grid(padding=(0, 2))
        for start in range(0, len(shown), width):
            numbers.add_row(*(_number(*pair) for pair in shown[start : start + width]))
        return Group(self._bar, numbers)


class NotebookProgress:
    """One output of a cell, updated in place: a bar, the watched metrics with their curves, notes and warnings."""

    def __init__(self, info: ProgressInfo, *, cell: UpdatedCell | None = None) -> None:
        self._info = info
        self._cell = cell or UpdatedCell()
        self._pace = Pace(info.clock)
        self._started = info.clock()
        self._step = info.first_step
        self._phase = "starting"
        self._history: defaultdict[str, list[float]] = defaultdict(list)
        self._notes: deque[tuple[str, str]] = deque(maxlen=NOTES_SHOWN)
        self._warned: set[str] = set()
        self._draw()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, self._phase = step, ""
        for name in self._info.trainer.metrics.watched:
            if math.isfinite(metrics.get(name, math.nan)):
                self._history[name].append(metrics[name])
        self._draw()

    def phase(self, name: str) -> None:
        self._phase = name
        self._draw()

    def note(self, message: str) -> None:
        self._notes.append(("note", redacted(message)))
        self._draw()

    def warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._notes.append(("warning", redacted(message)))
            self._draw()

    def close(self) -> None:
        self._phase = ""
        self._cell.show(*self._contents())

    def _draw(self) -> None:
        if self._pace.allows():
            self._cell.show(*self._contents())

    def _contents(self) -> tuple[str, str]:
        """The view as HTML, and its first line as text."""
        info, watched = self._info, self._info.trainer.metrics.watched
        left = info.seconds_left(self._step, self._started)
        details = [f"{format_duration(left)} left" if left else "", self._phase]
        label = f"{info.trainer.short_title}: {info.label(self._step)}"
        html = progress_html(
            label=label,
            details=[detail for detail in details if detail],
            share=self._step / max(info.total_steps, 1),
            numbers=[
                Number(label=watched[name], text=_shown(name, self._history[name][-1]), history=self._history[name])
                for name in watched
                if name in self._history and (not name.endswith(SKIPPED_UPDATES) or any(self._history[name]))
            ],
            notes=tuple(self._notes),
        )
        return html, label


def _file_console(file: TextIO) -> Console:
    """Plain lines into a file. In a notebook rich would show them in the cell and leave the file empty."""
    return Console(file=file, force_terminal=False, force_jupyter=False, color_system=None)


def _shown(name: str, number: float) -> str:
    return format_number(number, catalogue().find(name).unit)


def _number(label: str, number: str) -> Text:
    return Text.assemble((f"{label} ", "dim"), (number, "bold"))


def _print(console: Console, message: str) -> None:
    console.print(with_addresses(redacted(message)), markup=False, highlight=False, soft_wrap=True)
