"""Writes report.html, a self-contained page about a run or a pipeline of runs, from templates.

A page loads nothing: its security policy allows its own script alone, which shows values under the pointer and filters
samples; without it all is there to read. The template engine escapes all text that comes from data.
"""

import base64
import hashlib
import os
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from proximo.message_text import format_number
from proximo.metrics.report.views import as_yaml, run_alarms, stage_view
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
        reload_seconds=reload_seconds,
    )


def _write(folder: Path, runs: Sequence[Run]) -> Path:
    return write_page(folder / REPORT_NAME, report_page(runs, title=folder.resolve().name))


TEMPLATES = "templates"
GENERATOR = '<meta name="generator" content="Proximo">'
HEAD_BYTES = 1000
"""The first bytes of a page contain the generator."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src '{script}'; base-uri 'none'; form-action 'none'"


def rendered(template: str, **values: Any) -> str:
    """The HTML of a template."""
    frame = {"policy": policy(), "script": Markup(script()), "generator": Markup(GENERATOR)}
    return _engine().get_template(template).render(frame | values)


def policy() -> Markup:
    """The content security policy of a page. Its script is known by its digest, so no other one can run."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return Markup(POLICY.format(script=f"sha256-{digest}"))


def write_page(path: Path, page: str) -> Path:
    """Write a page as a whole, or nothing, and return its path.

    Another process may write the same page, so each uses its own temporary file.
    """
    half_written = path.with_name(f"{path.name}.{os.getpid()}.partial")
    half_written.write_text(page, encoding="utf-8", errors="replace")
    half_written.replace(path)
    return path


def is_page(path: Path) -> bool:
    """Whether a file is a page that was written here."""
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(HEAD_BYTES)


@cache
def script() -> str:
    """The script of all pages."""
    return files("proximo.metrics.report").joinpath(TEMPLATES, "report.js").read_text(encoding="utf-8")


@cache
def _engine() -> Environment:
    engine = Environment(
        loader=PackageLoader("proximo.metrics.report", TEMPLATES),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # A drawing is safe: its text was escaped when it was drawn.
    engine.filters |= {"number": format_number, "drawing": Markup, "yaml": as_yaml, "alarms": run_alarms}
    return engine
