"""Progress of a run for the person who started it: a live view on a terminal, plain lines elsewhere, or silence.

Only `LoggedProgress` keeps what it is told. Nothing is computed but the time that is left.
"""

import errno
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from proximo.errors import redacted
from proximo.metrics.catalogue import catalogue
from proximo.metrics.formatting import format_duration, format_number
from proximo.trainer_kinds import TrainerKind

Clock = Callable[[], float]


class ProgressView(Protocol):
    """A sink for a person. It is also told what goes on between two steps, and what must not be missed."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step that is done."""
        ...

    def phase(self, name: str) -> None:
        """Say what the run is doing now: "rollout", "evaluation"."""
        ...

    def note(self, message: str) -> None:
        """Show a line that stays."""
        ...

    def warn(self, message: str) -> None:
        """Show a warning that stays; the same words are shown once."""
        ...

    def close(self) -> None:
        """Leave the last numbers standing and give the terminal back."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """Where the run starts and ends, and when this process began."""

    trainer: TrainerKind
    total_steps: int
    first_step: int = 0
    """Steps that were done before this process: 0 unless resumed."""
    clock: Clock = time.monotonic

    def label(self, step: int) -> str:
        return f"step {step}/{self.total_steps}"

    def seconds_left(self, step: int, started: float) -> float | None:
        """From the pace of this process so far; None before its first step."""
        done = step - self.first_step
        if done <= 0:
            return None
        return (self.clock() - started) / done * (self.total_steps - step)


def open_progress(
    course: Course, *, console: Console | None = None, quiet: bool = False, every_seconds: float = 0.0
) -> ProgressView:
    """The view that fits the place: live on a terminal, else a line per step, at most one in `every_seconds`."""
    console = console or _Lasting(stderr=True)
    if quiet:
        return QuietProgress(console)
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalProgress(course, console)
    return PlainProgress(course, console, every_seconds=every_seconds)


class _Lasting(Console):
    """A console whose reader may go away: what is then printed is lost, and the run goes on.

    A pipe says so in one way, a terminal that was closed in another.
    """

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        try:
            super().__exit__(exc_type, exc_value, traceback)
        except OSError as refusal:
            if refusal.errno != errno.EIO:
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True


class QuietProgress:
    """Shows warnings and nothing else."""

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
    """One line of words and numbers per step, for log files and pipes. The first and the last step always show."""

    def __init__(self, course: Course, console: Console, *, every_seconds: float = 0.0) -> None:
        self._course = course
        self._console = console
        self._every_seconds = every_seconds
        self._quiet = QuietProgress(console)
        self._started = course.clock()
        self._shown: float | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now = self._course.clock()
        due = self._shown is None or now - self._shown >= self._every_seconds
        if not due and step < self._course.total_steps:
            return
        self._shown = now
        numbers = [
            f"{label} {_shown(name, metrics[name])}"
            for name, label in self._course.trainer.metrics.watched.items()
            if name in metrics
        ]
        left = self._course.seconds_left(step, self._started)
        remaining = [f"{format_duration(left)} left"] if left else []
        _print(self._console, "  ".join([self._course.label(step), *numbers, *remaining]))

    def phase(self, name: str) -> None: ...

    def note(self, message: str) -> None:
        _print(self._console, message)

    def warn(self, message: str) -> None:
        self._quiet.warn(message)

    def close(self) -> None: ...


class LoggedProgress:
    """Another view, and a file in which its plain lines stay.

    The file is appended to, on resume too: it tells what each process said, steps that were redone among it.
    """

    def __init__(self, course: Course, log: Path, shown: ProgressView) -> None:
        self._shown = shown
        self._file = log.open("a", encoding="utf-8", buffering=1)
        self._kept = PlainProgress(course, Console(file=self._file, force_terminal=False, color_system=None))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._kept.write(step, metrics)
        self._shown.write(step, metrics)

    def phase(self, name: str) -> None:
        self._shown.phase(name)

    def note(self, message: str) -> None:
        self._kept.note(message)
        self._shown.note(message)

    def warn(self, message: str) -> None:
        self._kept.warn(message)
        self._shown.warn(message)

    def keep(self, text: str) -> None:
        """Write to the file alone."""
        with suppress(OSError):  # what it tells of may be a disk that is full
            self._file.write(redacted(text))

    def close(self) -> None:
        self._shown.close()
        self._file.close()


class TerminalProgress:
    """A bar, what is going on, and the numbers that matter, redrawn in place. Notes and warnings scroll above it.

    While it is open, whatever is written to stdout and stderr also goes above it, so nothing tears the view.
    """

    def __init__(self, course: Course, console: Console) -> None:
        self._course = course
        self._quiet = QuietProgress(console)
        self._console = console
        self._started = course.clock()
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
            total=course.total_steps,
            completed=course.first_step,
            label=course.label(course.first_step),
            left="",
        )
        self._live = Live(get_renderable=self._view, console=console, refresh_per_second=4)
        self._live.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        watched = self._course.trainer.metrics.watched
        self._numbers |= {name: number for name, number in metrics.items() if name in watched}
        left = self._course.seconds_left(step, self._started)
        self._bar.update(
            self._task,
            completed=step,
            label=self._course.label(step),
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
        watched = self._course.trainer.metrics.watched
        shown = [name for name in watched if name in self._numbers]
        width = max(1, self._console.width // 15)
        numbers = Table.grid(padding=(0, 2))
        for start in range(0, len(shown), width):
            row = shown[start : start + width]
            numbers.add_row(*(_number(watched[name], _shown(name, self._numbers[name])) for name in row))
        return Group(self._bar, numbers)


def _shown(name: str, number: float) -> str:
    return format_number(number, catalogue().find(name).unit)


def _number(label: str, number: str) -> Text:
    return Text.assemble((f"{label} ", "dim"), (number, "bold"))


def _print(console: Console, message: str) -> None:
    console.print(redacted(message), markup=False, highlight=False, soft_wrap=True)
