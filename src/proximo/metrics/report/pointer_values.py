"""Data for report.js, which shows the values under the pointer: the area of a plot in its drawing, and its curves."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

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


def readout(area: Area, readings: Sequence[Reading], *, stacked: bool = False, along: str = "step") -> str:
    """The JSON of a plot. `along`: the quantity of the x axis. `stacked`: no point is at the height of its value."""
    return json.dumps(
        {
            "box": [round(edge, 1) for edge in area.box],
            "x": [_short(limit) for limit in area.x],
            "y": [_short(limit) for limit in area.y],
            "along": along,
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
