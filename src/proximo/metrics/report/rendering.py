"""Fills the templates of pages. A page is one file that loads nothing; its security policy allows its own script alone.

The template engine escapes all text that comes from data.
"""

import base64
import hashlib
import os
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from proximo.metrics.formatting import format_number

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
    engine.filters |= {"number": format_number, "drawing": _drawing}
    return engine


def _drawing(svg: str) -> Markup:
    """Marks a drawn SVG as safe HTML: its text was escaped when it was drawn."""
    return Markup(svg)
