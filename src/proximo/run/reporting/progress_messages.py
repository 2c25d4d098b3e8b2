"""Routes warnings and log messages of a run through its progress view."""

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO

from proximo.metrics.console import ProgressView


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
