"""Turns a matplotlib figure into an SVG element, and into the values that report.js shows under the pointer.

Figures are drawn in placeholder colours, which become CSS variables here, so that one SVG serves a light and a dark
page. Ids are made unique; metadata, comments and style sheets are removed.
"""

import re
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


def area_of(figure: Figure, axes: Axes) -> dict[str, list[float]]:
    """The area of axes whose position and limits are final, for report.js.

    `box`: left, top, right, bottom in units of the view box, whose y axis points down; `x`: the steps at left and
    right; `y`: the values at bottom and top.
    """
    place, (width, height) = axes.get_position(), figure.get_size_inches() * POINTS_PER_INCH
    box = (place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height)
    return {
        "box": [round(float(edge), 1) for edge in box],
        "x": [short(limit) for limit in axes.get_xlim()],
        "y": [short(limit) for limit in axes.get_ylim()],
    }


def short(number: float) -> float:
    """The number with six digits."""
    return number if isinstance(number, int) else float(f"{number:.6g}")
