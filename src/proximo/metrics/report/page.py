"""Writes report.html, a self-contained page about a run or a pipeline of runs.

The page loads nothing. Its script shows values under the pointer and filters samples; without it all is there to read.
"""

from collections.abc import Sequence
from pathlib import Path

from proximo.metrics.report.rendering import rendered, write_page
from proximo.metrics.report.views import SAMPLES_SHOWN, headlines, newest, stage_view
from proximo.metrics.run_files import Run, read_run
from proximo.trainer_kinds import trainer_kinds

REPORT_NAME = "report.html"


def write_report(run_folder: Path) -> Path:
    """Write the report of a run into its folder and return its path.

    Files of the run may be missing or truncated. Raises FileNotFoundError if there is no such folder.
    """
    return _write(run_folder, [read_run(run_folder)])


def write_pipeline_report(pipeline_folder: Path) -> Path:
    """Write one report of all stages in the folder and return its path. Raises FileNotFoundError if there are none."""
    stages = stage_folders(pipeline_folder)
    if not stages:
        wanted = ", ".join(kind.name for kind in trainer_kinds())
        raise FileNotFoundError(f"none of the stages {wanted} was found in {pipeline_folder}: is it a pipeline's run?")
    return _write(pipeline_folder, [read_run(stage) for stage in stages])


def stage_folders(pipeline_folder: Path) -> list[Path]:
    """The stage folders of a pipeline, which are named after their trainers, in the order in which the stages run."""
    return [folder for kind in trainer_kinds() if (folder := pipeline_folder / kind.name).is_dir()]


def report_page(runs: Sequence[Run], *, title: str, reload_seconds: int | None = None) -> str:
    """The HTML of the page. The same runs give the same bytes.

    `reload_seconds`: of a run that is not over, how often the page loads itself again. It also has the newest answers.
    """
    stages = [stage_view(run, key=f"s{number}") for number, run in enumerate(runs, 1)]
    return rendered(
        "report.html.jinja",
        title=title,
        stages=stages,
        samples_shown=SAMPLES_SHOWN,
        headlines=headlines(stages) if len(stages) > 1 else (),
        reload_seconds=reload_seconds,
        newest={} if reload_seconds is None else {s.key: newest(run) for s, run in zip(stages, runs, strict=True)},
    )


def _write(folder: Path, runs: Sequence[Run]) -> Path:
    return write_page(folder / REPORT_NAME, report_page(runs, title=folder.resolve().name))
