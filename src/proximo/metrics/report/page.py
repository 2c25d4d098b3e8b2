"""Writes report.html, a self-contained page about a run or a pipeline of runs.

The page has no scripts and loads nothing; its content security policy forbids both. The template engine escapes all
text that comes from data.
"""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from proximo.metrics.curves import Section
from proximo.metrics.formatting import format_number
from proximo.metrics.report.views import SAMPLES_SHOWN, headlines, stage_view
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


def report_page(runs: Sequence[Run], *, title: str) -> str:
    """The HTML of the page. The same runs give the same bytes."""
    stages = [stage_view(run, key=f"s{number}") for number, run in enumerate(runs, 1)]
    engine = Environment(
        loader=PackageLoader("proximo.metrics.report", "templates"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    engine.filters["number"] = format_number
    return engine.get_template("report.html.jinja").render(
        title=title,
        stages=stages,
        sections=list(Section),
        samples_shown=SAMPLES_SHOWN,
        drawing=_drawing,
        headlines=headlines(stages) if len(stages) > 1 else (),
    )


def _drawing(svg: str) -> Markup:
    """Marks a drawn SVG as safe HTML: its text was escaped when it was drawn."""
    return Markup(svg)


def _write(folder: Path, runs: Sequence[Run]) -> Path:
    path = folder / REPORT_NAME
    half_written = path.with_suffix(".html.partial")
    page = report_page(runs, title=folder.resolve().name)
    half_written.write_text(page, encoding="utf-8", errors="replace")
    half_written.replace(path)
    return path
