"""HTML for the output cells of notebooks: progress, facts, runs, samples, and a whole page in a frame.

Plain values come in. The template engine escapes all text; only drawn SVGs, which were escaped when they were drawn,
are passed on as they are. No scripts; colours follow those of the notebook, light or dark.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a run outside of a notebook needs no templates before its report
    from jinja2 import Environment

SPARK_POINTS, SPARK_WIDTH, SPARK_HEIGHT = 60, 90, 18
"""The most points of a sparkline, and its size in pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """One number of a progress view, with its values so far."""

    label: str
    text: str
    history: Sequence[float] = ()


class Column(StrEnum):
    """What a column of a table holds; also its class in the style sheet."""

    NUMBER = "number"
    WORDS = "words"
    TEXT = "text"
    """Running text, such as a response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of texts in their columns."""

    columns: Mapping[str, Column]
    """By heading, in order."""
    rows: Sequence[Sequence[str]]
    title: str = ""
    tones: Sequence[str] = ()
    """`good`, `bad` or empty for each row: the colour of its last cell. Empty for a table without colours."""
    num_more: int = 0
    """Rows that exist and are not shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """A curve that is drawn, with its title."""

    title: str
    unit: str
    svg: str
    """An SVG element whose texts are escaped."""
    legend: Sequence[tuple[int, str]] = ()
    """(number of the colour, label) of each series."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A titled box of facts, with what follows them."""

    title: str
    status: str = ""
    facts: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = ()
    folded: Sequence[Table] = ()
    """Tables that are shown on a click, under their titles."""


def progress_html(
    *,
    label: str,
    details: Sequence[str],
    share: float,
    numbers: Sequence[Number],
    notes: Sequence[tuple[str, str]],
) -> str:
    """A bar with its numbers. `share` is in [0, 1]; `notes` are (kind, text), of kind `note` or `warning`."""
    return _rendered(
        "progress",
        label=label,
        details=details,
        percent=100 * min(max(share, 0.0), 1.0),
        numbers=numbers,
        notes=notes,
        spark=(SPARK_WIDTH, SPARK_HEIGHT),
    )


def card_html(card: Card) -> str:
    """A card as HTML."""
    return _rendered("card", card=card)


def table_html(table: Table) -> str:
    """A table as HTML, with nothing around it."""
    return _rendered("table", table=table)


def page_html(page: str, *, title: str) -> str:
    """A whole HTML page in a frame of its own. Scripts in it do not run."""
    return _rendered("page", page=page, title=title)


def polyline(values: Sequence[float]) -> str:
    """The points of a sparkline, newest on the right. Empty for fewer than two values."""
    count = len(values)
    if count < 2:
        return ""
    size = min(count, SPARK_POINTS)
    shown = [values[round(index * (count - 1) / (size - 1))] for index in range(size)]
    low, high = min(shown), max(shown)
    across, up = SPARK_WIDTH / (size - 1), (SPARK_HEIGHT - 2) / (high - low) if high > low else 0.0
    bottom = SPARK_HEIGHT - 1 if high > low else SPARK_HEIGHT / 2
    return " ".join(f"{index * across:.1f},{bottom - (value - low) * up:.1f}" for index, value in enumerate(shown))


def _rendered(part: str, **values: Any) -> str:
    text = _engine().get_template(f"{part}.html.jinja").render(**values)
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair in a response is no text that can be sent


@cache
def _engine() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
    from markupsafe import Markup

    engine = Environment(
        loader=PackageLoader("proximo.metrics.notebook", "templates"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    engine.filters["polyline"] = polyline
    engine.filters["drawn"] = Markup
    return engine
