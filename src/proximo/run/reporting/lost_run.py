"""Writes the outcome of a run whose rank 0 was killed, from its launcher or another rank."""

from contextlib import suppress
from pathlib import Path

from proximo.checkpoint.run_folder import open_abandoned
from proximo.errors import redacted
from proximo.metrics.report.page import write_report
from proximo.metrics.run_files import read_run


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
        with opened.log.open("a", encoding="utf-8") as log:
            log.write(f"{reason}\nfailed, report in {folder / page.name}\n")
