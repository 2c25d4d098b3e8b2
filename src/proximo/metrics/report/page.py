"""Writes report.html: one file that shows a run, or a pipeline of runs, to anyone with a browser. Reads files only.

The page has no script and asks for nothing outside itself, and its content security policy forbids both; whatever comes
from data is escaped by the template engine.
"""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from proximo.metrics.curves import Section
from proximo.metrics.formatting import format_number
from proximo.metrics.report.views import SAMPLES_SHOWN, glance, stage_view
from proximo.metrics.run_files import Run, read_run
from proximo.trainer_kinds import trainer_kinds

REPORT_NAME = "report.html"


def write_report(run_folder: Path) -> Path:
    """Write the report of one run into its folder and say where it is. FileNotFoundError without such a folder.

    Any file of the run may be missing or cut off: the report shows what there is.
    """
    return _write(run_folder, [read_run(run_folder)])


def write_pipeline_report(pipeline_folder: Path) -> Path:
    """Write one report of all stages that the folder holds. FileNotFoundError without any."""
    stages = stage_folders(pipeline_folder)
    if not stages:
        wanted = ", ".join(kind.name for kind in trainer_kinds())
        raise FileNotFoundError(f"none of the stages {wanted} was found in {pipeline_folder}: is it a pipeline's run?")
    return _write(pipeline_folder, [read_run(stage) for stage in stages])


def stage_folders(pipeline_folder: Path) -> list[Path]:
    """The stage folders of a pipeline, which are named after their trainers, in the order in which the stages run."""
    return [folder for kind in trainer_kinds() if (folder := pipeline_folder / kind.name).is_dir()]


def report_page(runs: Sequence[Run], *, title: str) -> str:
    """The page itself, as text: the same runs give the same bytes."""
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
        glance=glance(stages) if len(stages) > 1 else (),
    )


def _drawing(svg: str) -> Markup:
    """Marks our own SVG as HTML; the words in it were escaped when it was drawn."""
    return Markup(svg)


def _write(folder: Path, runs: Sequence[Run]) -> Path:
    path = folder / REPORT_NAME
    half_written = path.with_suffix(".html.partial")
    page = report_page(runs, title=folder.resolve().name)
    half_written.write_text(page, encoding="utf-8", errors="replace")
    half_written.replace(path)
    return path
