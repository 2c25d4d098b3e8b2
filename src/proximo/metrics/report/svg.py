"""Turns a matplotlib figure into an SVG element, and into the values that report.js shows under the pointer.

Figures are drawn in placeholder colours, which become CSS variables here, so that one SVG serves a light and a dark
page. Ids are made unique; metadata, comments and style sheets are removed.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK = "#010101"
MUTED = "#020202"
GRID = "#030303"
SERIES = tuple(f"#0{number}0a0a" for number in range(1, 10))

COLOURS = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)"} | {
    stand_in: f"var(--c{number})" for number, stand_in in enumerate(SERIES, 1)
}


def figure_to_svg(figure: Figure) -> str:
    """The figure as an `<svg>` element, without a description and with ids that are not yet unique; see `embed_svg`."""
    stream = StringIO()
    FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawing = stream.getvalue()
    body = drawing[drawing.index("<svg") :]
    body = re.sub(r"<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = _short_numbers(body)
    for stand_in, variable in COLOURS.items():
        body = body.replace(stand_in, variable)
    return body


def embed_svg(svg: str, *, key: str, description: str) -> str:
    """An element of `figure_to_svg`, ready for the page.

    `key` must be unique in the page: it becomes the prefix of ids.
    """
    body = _own_ids(svg, key)
    return _opening(body, description) + body[body.index(">") + 1 :].strip()


def _opening(body: str, description: str) -> str:
    view = re.search(r'viewBox="([^"]+)"', body)
    assert view is not None, "matplotlib gives every SVG a viewBox"
    return f'<svg viewBox="{view.group(1)}" role="img" aria-label="{_attribute(description)}">'


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def _own_ids(body: str, key: str) -> str:
    """Prefix referenced ids with the key; drop all others, which would occur in every figure."""
    referred = set(re.findall(r'(?:url\(|href=")#([^")]+)', body))

    def renamed(match: re.Match[str]) -> str:
        return f' id="{key}-{match.group(1)}"' if match.group(1) in referred else ""

    body = re.sub(r' id="([^"]*)"', renamed, body)
    return re.sub(r'(?:xlink:)?(url\(|href=")#', rf"\1#{key}-", body)


def _short_numbers(body: str) -> str:
    """Round coordinates inside tags to a tenth of a point, finer than any screen. Text between tags stays."""

    def shortened(tag: re.Match[str]) -> str:
        return re.sub(r"\d+\.\d+", lambda number: f"{float(number.group()):.1f}".removesuffix(".0"), tag.group())

    return re.sub(r"\s*\n\s*", "\n", re.sub(r"<[^>]*>", shortened, body))


POINTS_PER_INCH = 72
"""Of matplotlib's SVG, in whose view box one unit is a point."""
DIGITS = 6


@dataclass(frozen=True, slots=True)
class Area:
    """The area of a plot between its axes."""

    box: tuple[float, float, float, float]
    """left, top, right, bottom in units of the view box, whose y axis points down."""
    x: tuple[float, float]
    """The steps at left and right."""
    y: tuple[float, float]
    """The values at bottom and top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One series as it was drawn."""

    label: str
    colour: int
    x: Sequence[float]
    y: Sequence[float]
    mean_of: int = 1
    """Each point is the mean of up to so many steps."""


def area_of(figure: Figure, axes: Axes) -> Area:
    """The area of axes whose position and limits are final."""
    place, (width, height) = axes.get_position(), figure.get_size_inches() * POINTS_PER_INCH
    box = (place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    return Area(box, (left, right), (low, high))


def readout(area: Area, readings: Sequence[Reading], *, stacked: bool = False) -> str:
    """The JSON of a plot. `stacked`: no point is at the height of its value."""
    return json.dumps(
        {
            "box": [round(edge, 1) for edge in area.box],
            "x": [_short(limit) for limit in area.x],
            "y": [_short(limit) for limit in area.y],
            "stacked": stacked,
            "series": [
                {
                    "label": reading.label,
                    "colour": reading.colour,
                    "x": [_short(step) for step in reading.x],
                    "y": [_short(value) for value in reading.y],
                    "mean_of": reading.mean_of,
                }
                for reading in readings
            ],
        },
        separators=(",", ":"),
    )


def _short(number: float) -> float:
    return number if isinstance(number, int) else float(f"{number:.{DIGITS}g}")
