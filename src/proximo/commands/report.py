"""Writes the report page of a run, or of a pipeline with all its stages, and the page that compares several of them."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from proximo.errors import RunFolderError, UserError, naming
from proximo.metrics.catalogue import trainer_by_metrics
from proximo.metrics.report.comparison import NamedRun, comparison_page
from proximo.metrics.report.page import REPORT_NAME, is_page, report_page, stage_folders, write_page
from proximo.metrics.report.svg import SERIES
from proximo.metrics.report.views import run_alarms
from proximo.metrics.run_files import Run, read_run
from proximo.trainer_kinds import trainer_kinds

COMPARISON = "comparison.html"
METRICS = "metrics.jsonl"
FOLLOWED = (METRICS, "outcome.json")
"""Files that change when a run has taken a step or has ended."""
FOLLOW_SECONDS, REST = 5, 10
LAST_STAGE = "ppo"
"""The last stage of every pipeline."""
MOST_RUNS = len(SERIES)
"""The number of colours: each run has its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeReport:
    """A report page and its warnings."""

    page: Path
    alarms: Sequence[str]
    """Each as `stage: severity: text`; of a comparison as `run: severity: text`."""
    follows: bool = False
    """Whether the page reloads itself, since the run has not ended."""


def make_report(run: Path, out: Path | None = None, *, follow: bool = False) -> MadeReport:
    """Write the page of a run or a pipeline to `out`, by default `report.html` in its folder.

    `follow`: a page that reloads itself, if the run has not ended.

    Raises RunFolderError for a folder without a run, or a run without lines, and UserError for an `out` that cannot be
    written or is not a report page.
    """
    out = out or run / REPORT_NAME
    begun = _begun(run)
    check_page_file(out)
    is_pipeline = not (run / METRICS).is_file()
    runs = [read_run(stage) for stage in stage_folders(run)] if is_pipeline else begun
    follow = follow and not _has_ended(runs, is_pipeline=is_pipeline)
    page = report_page(runs, title=run.resolve().name, reload_seconds=FOLLOW_SECONDS if follow else None)
    alarms = [text for each in runs for text in _alarms(each.name, each)]
    return MadeReport(page=_written(out, page), alarms=alarms, follows=follow)


def followed_report(run: Path, out: Path | None = None) -> Iterator[MadeReport]:
    """Rewrite the page of an unfinished run whenever the run has logged something, and yield each page.

    The page reloads itself, except the last one, which is written when the run has ended or at an interrupt. Drawing a
    long run takes seconds, so it pauses ten times as long. Waits for the first line of a run. Raises what `make_report`
    raises.
    """
    if not run.is_dir():
        raise RunFolderError(f"{run} is not a folder, so no run can be followed there")
    seen = None
    try:
        while True:
            signature, start = _signature(run), time.process_time()
            if signature != seen and any(signature):
                made = make_report(run, out, follow=True)
                seen = signature
                yield made
                if not made.follows:
                    return
            time.sleep(max(FOLLOW_SECONDS, REST * (time.process_time() - start)))
    except KeyboardInterrupt:
        if seen is not None:
            make_report(run, out)
        raise


def _signature(run: Path) -> tuple[tuple[int, int] | None, ...]:
    """Values that change when a run, or a stage of a pipeline, has written something; None for a missing file."""
    return tuple(_written_to(folder / name) for folder in (run, *stage_folders(run)) for name in FOLLOWED)


def _written_to(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size) if found.st_size else None


def _has_ended(runs: Sequence[Run], *, is_pipeline: bool) -> bool:
    """Whether a run has an outcome; of a pipeline, whether its last stage has one, or one did not finish."""
    states = {each.outcome.state if each.outcome else None for each in runs}
    if is_pipeline and runs[-1].name != LAST_STAGE and states == {"finished"}:
        return False
    return None not in states


def make_comparison(runs: Sequence[Path], out: Path) -> MadeReport:
    """Write a page that compares runs: different settings, figures, alarms, curves and answers.

    `runs`: folders of 2 to 9 runs. Pipelines are compared stage by stage, also with single runs. Runs of different
    trainers are compared by the metrics that they share.

    Raises RunFolderError for a folder without a run, a run without metrics, or nothing to compare, and UserError for
    the number of runs and an `out` that cannot be written or holds something else.
    """
    if not 2 <= len(runs) <= MOST_RUNS:
        raise UserError(f"a comparison is of 2 to {MOST_RUNS} runs, one colour for each, got {len(runs)}")
    resolved = [folder.resolve() for folder in runs]
    if twice := next((folder for folder, one in zip(runs, resolved, strict=True) if resolved.count(one) > 1), None):
        raise UserError(f"the run {twice} is given twice: a comparison needs different runs")
    check_page_file(out)
    named = [
        each
        for colour, (folder, label) in enumerate(zip(runs, _labels(resolved), strict=True), 1)
        for each in _named(folder, label, colour)
    ]
    groups = list(_groups(named))
    if not groups:
        raise RunFolderError("the runs have no stage in common, so there is nothing to compare: give runs of one kind")
    alarms = [text for each in named for text in _alarms(each.place, each.run)]
    return MadeReport(page=_written(out, comparison_page(groups)), alarms=alarms)


def check_page_file(path: Path) -> None:
    """Raises UserError if a page cannot be written to `path`, or would replace a file that is not a page of Proximo."""
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder: give a file to write the page to, such as {path / REPORT_NAME}")
        if not path.parent.is_dir():
            raise UserError(f"there is no folder {path.parent} to write {path.name} to")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise UserError(
                f"the page {path} cannot be written: the permissions of {path.parent} refuse it; give another out"
            )
        if path.exists() and not is_page(path):
            raise UserError(f"{path} is not a page of Proximo and is left as it is: give another file")
    except OSError as error:
        raise UserError(f"the file {path} cannot be read ({error.strerror}): give another one") from error


def _written(path: Path, page: str) -> Path:
    with naming(path):
        return write_page(path, page)


def _begun(run: Path) -> list[Run]:
    """The run itself, or the stages of a pipeline that have begun.

    Raises RunFolderError if there are none, or none has a line of metrics or an outcome, as a run that failed at once.
    """
    if not run.is_dir():
        raise RunFolderError(f"there is no run folder {run}")
    folders = [folder for folder in (run, *stage_folders(run)) if (folder / METRICS).is_file()]
    if not folders:
        raise RunFolderError(f"{run} holds no run: there is no file {METRICS} in it or in a stage below it")
    begun = [read_run(folder) for folder in (folders[:1] if folders[0] == run else folders)]
    if not any(each.lines or each.outcome is not None for each in begun):
        unreadable = begun[0].num_unreadable
        what = f"none of its {unreadable} lines can be read" if unreadable else "it is empty"
        raise RunFolderError(f"the run in {folders[0]} has no line yet to report: {folders[0] / METRICS}: {what}")
    return begun


def _groups(runs: Sequence[NamedRun]) -> Iterator[Sequence[NamedRun]]:
    """Groups of runs to compare: all in one if none is a stage, else one group per trainer."""
    if not any(run.is_stage for run in runs):
        yield runs
        return
    for kind in trainer_kinds():
        members = [run for run in runs if trainer_by_metrics(run.run.names) is kind]
        if len({run.label for run in members}) > 1:
            yield members


def _labels(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths, equally long, that distinguish the folders."""
    longest = max(len(folder.parts) for folder in folders)
    ends = ([str(Path(*folder.parts[-count:])) for folder in folders] for count in range(1, longest + 1))
    return next(names for names in ends if len(set(names)) == len(names))


def _named(folder: Path, label: str, colour: int) -> Sequence[NamedRun]:
    """The run, or the stages of a pipeline that have metrics. Raises RunFolderError if there are none."""
    is_stage = not (folder / METRICS).is_file()
    runs = [NamedRun(label=label, colour=colour, run=each, is_stage=is_stage) for each in _begun(folder)]
    if known := [run for run in runs if trainer_by_metrics(run.run.names) is not None]:
        return known
    raise RunFolderError(f"the run in {folder} has recorded no metric, so there is nothing to compare")


def _alarms(label: str, run: Run) -> list[str]:
    return [f"{label}: {each.severity}: {each.text}" for each in run_alarms(run)]
