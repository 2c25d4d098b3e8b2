"""Writes the report page of a run, or of a pipeline with all its stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proximo.checkpoint.run_folder import settle_run
from proximo.errors import RunFolderError
from proximo.metrics.report.page import stage_folders, write_pipeline_report, write_report
from proximo.metrics.report.views import run_alarms
from proximo.metrics.run_files import read_run


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeReport:
    """A report page and what it warns of."""

    page: Path
    alarms: Sequence[str]
    """Each as `stage: severity: text`."""


def make_report(run: Path) -> MadeReport:
    """Write `report.html` into the folder. Raises RunFolderError for a folder without a run, or a run without lines."""
    for folder in (run, *stage_folders(run)):
        settle_run(folder)
    stages = [stage for stage in stage_folders(run) if (stage / "metrics.jsonl").is_file()]
    alone = (run / "metrics.jsonl").is_file()
    stages = [run] if alone else stages
    if not stages:
        raise RunFolderError(f"{run} holds no run: there is no file metrics.jsonl in it or in a stage below it")
    _refuse_nothing_to_report(stages)
    page = write_report(run) if alone else write_pipeline_report(run)
    alarms = [f"{stage.name}: {each.severity}: {each.text}" for stage in stages for each in run_alarms(read_run(stage))]
    return MadeReport(page=page, alarms=alarms)


def _refuse_nothing_to_report(stages: Sequence[Path]) -> None:
    """Raises RunFolderError if no stage has a metrics line or an outcome. A run that failed at once has an outcome."""
    runs = [read_run(stage) for stage in stages]
    if any(run.lines or run.outcome is not None for run in runs):
        return
    log, unreadable = stages[0] / "metrics.jsonl", runs[0].num_unreadable
    if unreadable:
        raise RunFolderError(f"{log} is not a metrics file: none of its {unreadable} lines can be read")
    raise RunFolderError(f"the run in {stages[0]} has no line yet to report: {log} is empty")
