"""The page of a run that goes on: reads the run's files, and nothing is written or locked.

Reading a long run and drawing it take a second or two each, so they rest REST times as long as they took, and are done
only while somebody looks.
"""

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from proximo.metrics.catalogue import trainer_by_metrics
from proximo.metrics.curves import Section
from proximo.metrics.formatting import format_duration
from proximo.metrics.report.head import TIMED, outcome_words
from proximo.metrics.report.page import stage_folders
from proximo.metrics.report.rendering import policy, rendered
from proximo.metrics.report.views import SAMPLES_SHOWN, stage_view
from proximo.metrics.run_files import Run, Sample, read_run

WATCHED = ("metrics.jsonl", "samples.jsonl", "outcome.json", "config.resolved.json", "log.txt", "checkpoints/latest")
"""Files that a run writes as it goes on."""
ALWAYS_DRAWN = (Section.MAIN, Section.SPEED)
"""The others are drawn for those who have opened them."""
REST = 10
STEPS_TIMED = 10
QUIET_AFTER_STEPS = 5
"""A run that has written nothing for as long as so many steps may hang."""
QUIET_AFTER_SECONDS, QUIET_BEFORE_STEPS_SECONDS = 120.0, 900.0
"""At least; and before the first line, when models are loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Where a run is."""

    kind: str
    """`waiting`, `running`, `quiet`, `ended` or `failed`."""
    words: str
    share: float | None = None
    """Steps done of those planned; None if unknown."""


class LivePage:
    """The page of a run folder, or of a pipeline's, which need not exist yet. May be asked by several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._runs: Sequence[tuple[Path, Run]] = ()
        self._read: tuple[object, ...] = ()
        """The signature of the files that were read."""
        self._reading = _Work()
        self._parts = {more: _Drawn() for more in (False, True)}
        """The main part, without and with all curves."""

    @property
    def has_run(self) -> bool:
        """Whether the folder has files of a run."""
        return bool(self._stages())

    @property
    def waiting_for(self) -> str:
        """What is missing, for a folder without a run."""
        what = "holds no run yet" if self.folder.is_dir() else "is no folder yet"
        return f"{self.folder} {what}"

    def page(self) -> str:
        """The HTML of the whole page. Its script asks for `state`."""
        with self._lock:
            part = self._refreshed(more=False)
            return rendered(
                "live.html.jinja",
                title=self.folder.resolve().name,
                main=part.html,
                version=part.version,
                status=self._status(),
                policy=policy(live=True),
            )

    def state(self, seen: str, *, more: bool = False) -> Mapping[str, Any]:
        """The status, and the main part of the page as HTML if it is another than the version that was seen.

        `more`: with all curves.
        """
        with self._lock:
            part = self._refreshed(more=more)
            status, version, main = self._status(), part.version, part.html
        return {
            "version": version,
            "main": None if seen == version else main,
            "kind": status.kind,
            "words": status.words,
            "share": status.share,
        }

    def _refreshed(self, *, more: bool) -> "_Drawn":
        """Read the files if one has changed, and draw what was read, each if the last time was long enough ago."""
        signature = tuple(_signature(stage) for stage in self._stages())
        if signature != self._read and self._reading.due:
            with suppress(OSError), self._reading:  # a folder that is being replaced is there at the next look
                self._runs = [(stage, read_run(stage)) for stage in self._stages()]
                self._read = signature
        part = self._parts[more]
        if part.signature != self._read and part.drawing.due:
            with part.drawing:
                runs = [run for _, run in self._runs]
                part.html = _main_part(runs, sections=tuple(Section) if more else ALWAYS_DRAWN)
                part.signature = self._read
        return part

    def _stages(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        if any((self.folder / name).exists() for name in WATCHED):
            return [self.folder]
        return stage_folders(self.folder)

    def _status(self) -> Status:
        if not self._runs:
            return Status(kind="waiting", words=f"waiting: {self.waiting_for}")
        stage, run = max(self._runs, key=lambda each: _last_written(each[0]))
        status = run_status(run, quiet_seconds=time.time() - _last_written(stage))
        if stage == self.folder:
            return status
        trainer = trainer_by_metrics(run.names)
        name = trainer.short_title if trainer else stage.name
        return Status(kind=status.kind, words=f"{name}: {status.words}", share=status.share)


def run_status(run: Run, *, quiet_seconds: float) -> Status:
    """The status of a run that has written nothing for so many seconds."""
    share = min(1.0, (run.last_step or 0) / run.total_steps) if run.total_steps else None
    if run.outcome is not None:
        failed = run.outcome.state == "failed"
        return Status(kind="failed" if failed else "ended", words=outcome_words(run), share=share)
    recent = run.lines[-STEPS_TIMED:]
    took = [sum(line.get(name, 0.0) for name in TIMED) for line in recent]
    patience = max(QUIET_AFTER_SECONDS, QUIET_AFTER_STEPS * max(took)) if run.lines else QUIET_BEFORE_STEPS_SECONDS
    done = "before the first step" if not run.last_step else f"step {run.last_step:,}"
    of = f" of {run.total_steps:,}" if run.last_step and run.total_steps else ""
    ago = format_duration(max(0.0, quiet_seconds))
    if quiet_seconds > patience:
        words = f"{done}{of}; nothing was written for {ago}: the run may hang, or was killed"
        return Status(kind="quiet", words=words, share=share)
    steps = [line["time/step_seconds"] for line in recent if "time/step_seconds" in line]
    left = (
        f"; about {format_duration(fmean(steps) * (run.total_steps - (run.last_step or 0)))} left"
        if (steps and run.total_steps)
        else ""
    )
    return Status(kind="running", words=f"running: {done}{of}{left}; last written {ago} ago", share=share)


class _Work:
    """Work that is repeated with rests, by the processor time that it took. A context manager around it."""

    def __init__(self) -> None:
        self._start = self._next = 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    def __enter__(self) -> None:
        self._start = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._next = time.monotonic() + REST * (time.thread_time() - self._start)


class _Drawn:
    """The main part of the page as it was drawn last."""

    def __init__(self) -> None:
        self.html = _main_part([], sections=())
        self.signature: tuple[object, ...] = ()
        """Of the files that it shows."""
        self.drawing = _Work()

    @property
    def version(self) -> str:
        return hashlib.sha256(self.html.encode(errors="replace")).hexdigest()[:16]


def _main_part(runs: Sequence[Run], *, sections: Sequence[Section]) -> str:
    """The stages, the newest first: it is the one that goes on. `sections`: whose curves are drawn."""
    views = [stage_view(run, key=f"s{number}", sections=sections) for number, run in enumerate(runs, 1)]
    newest = {view.key: _newest(run) for view, run in zip(views, runs, strict=True)}
    return rendered("live_main.html.jinja", stages=views[::-1], newest=newest, samples_shown=SAMPLES_SHOWN)


def _newest(run: Run) -> tuple[Sample, ...]:
    """The newest answers of training, newest first."""
    return tuple(reversed(run.samples.training[-SAMPLES_SHOWN:]))


def _signature(stage: Path) -> tuple[object, ...]:
    return (stage, *(_written(stage / name) for name in WATCHED))


def _written(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _last_written(stage: Path) -> float:
    """When a file of the stage was last written, in seconds since 1970."""
    times = [written[0] for name in WATCHED if (written := _written(stage / name)) is not None]
    return max(times, default=0) / 1e9
