"""Draws the plots of a report as SVG text with matplotlib.

Long runs are downsampled: each point is the mean over a span of steps.
"""

import json
import logging
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from statistics import fmean

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from proximo.message_text import format_number
from proximo.metrics.definitions import Curve, Style, Trace
from proximo.metrics.report.svg import GRID, INK, MUTED, SERIES, area_of, embed_svg, figure_to_svg, short
from proximo.metrics.run_files import Run, Series

WIDTH_INCHES, HEIGHT_INCHES = 4.6, 2.5
POINTS_PER_TEXT = 14
"""Font size. A plot is 331 points wide and 290 pixels on the narrowest phones, where text is then 12 pixels high."""
MAX_POINTS = {Style.LINE: 160, Style.POINTS: 60}
SMOOTHED_FROM = 30
JOINED_FROM = 3
"""Fewer points are drawn without a line, which would suggest a trend that two measurements do not show."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """A drawn plot with its legend."""

    svg: str
    legend: tuple[tuple[int, str], ...]
    """(number of the colour, label) of each series, for a legend in HTML."""
    readout: str
    """JSON for report.js, which shows values under the pointer: the area of the plot, and each series as it was drawn,
    whose points are means of up to `mean_of` steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A series of a plot and its look."""

    label: str
    colour: int
    """The number of the colour, from 1."""
    series: Series
    style: Style = Style.LINE


def draw_curve(curve: Curve, run: Run, *, key: str) -> Plot | None:
    """Draw a curve of a run; None if the run has none of its metrics. `key` must be unique in the page."""
    traces = [(trace, run.series(trace.name)) for trace in expanded(curve.traces, run.names)]
    recorded = [(trace, series) for trace, series in traces if len(series)]
    lines = [
        Line(label=trace.label, colour=colour, series=series, style=trace.style)
        for colour, (trace, series) in enumerate(recorded, 1)
    ]
    return draw_lines(curve, lines, key=key) if lines else None


def draw_lines(curve: Curve, lines: Sequence[Line], *, key: str) -> Plot:
    """Draw series, at least one and none empty, in the frame of a curve. `key` must be unique in the page."""
    shown = tuple(replace(line, series=downsampled(line.series, MAX_POINTS[line.style])) for line in lines)
    drawing, area = _drawing(curve, shown)
    readings = [
        {
            "label": line.label,
            "colour": line.colour,
            "x": line.series.steps,
            "y": [short(value) for value in line.series.values],
            "mean_of": math.ceil(len(whole.series) / len(line.series)),
        }
        for whole, line in zip(lines, shown, strict=True)
    ]
    return Plot(
        svg=embed_svg(drawing, key=key, description=_description(curve, lines)),
        legend=tuple((line.colour, line.label) for line in lines),
        readout=json.dumps({**area, "series": readings}, separators=(",", ":")),
    )


@lru_cache(maxsize=64)  # a pipeline's report repeats the plots of its stages' reports
def _drawing(curve: Curve, lines: tuple[Line, ...]) -> tuple[str, dict[str, list[float]]]:
    """The drawing of downsampled series, for `embed_svg`, and its area. Cached, so it must not depend on the page."""
    with _canvas() as (figure, axes):
        for line in lines:
            _draw(axes, line.style, line.series, SERIES[(line.colour - 1) % len(SERIES)])
        _set_y_limits(axes, curve)
        if curve.guide is not None:
            axes.axhline(curve.guide, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        _set_left_margin(axes)
        return figure_to_svg(figure), area_of(figure, axes)


def expanded(traces: Sequence[Trace], names: Sequence[str]) -> list[Trace]:
    """Replace each `<component>` pattern by the metrics that match it, at most one per colour."""
    found: list[Trace] = []
    for trace in traces:
        before, pattern, after = trace.name.partition("<component>")
        if not pattern:
            found.append(trace)
            continue
        members = sorted(name for name in names if name.startswith(before) and name.endswith(after))
        # A component is one segment of the name: no further slash.
        members = [name for name in members if name.count("/") == trace.name.count("/")]
        found += [Trace(name, name[len(before) : len(name) - len(after)]) for name in members[: len(SERIES)]]
    return found


def _description(curve: Curve, lines: Sequence[Line]) -> str:
    parts = (
        f"{line.label} from {format_number(line.series.values[0])} at step {line.series.steps[0]} "
        f"to {format_number(line.series.values[-1])} at step {line.series.steps[-1]}"
        for line in lines
    )
    return f"{curve.title}: {', '.join(parts)}"


def _draw(axes: Axes, style: Style, series: Series, tone: str) -> None:
    if len(series) < JOINED_FROM:
        axes.plot(series.steps, series.values, marker="o", markersize=5, linestyle="none", color=tone)
    elif style is Style.POINTS:
        axes.plot(series.steps, series.values, marker="o", markersize=3.6, linewidth=0.9, linestyle="--", color=tone)
    elif len(series) < SMOOTHED_FROM:
        axes.plot(series.steps, series.values, linewidth=1.6, color=tone)
    else:
        # Raw values in the background, so that the smoothed line hides no noise.
        axes.plot(series.steps, series.values, linewidth=0.8, alpha=0.35, color=tone)
        smooth = smoothed(series)
        axes.plot(smooth.steps, smooth.values, linewidth=1.7, color=tone)


def downsampled(series: Series, max_points: int) -> Series:
    """At most `max_points` points: means over spans of about equal length."""
    count = len(series)
    if count <= max_points:
        return series
    edges = [round(bucket * count / max_points) for bucket in range(max_points + 1)]
    spans = list(pairwise(edges))
    steps = tuple(round(fmean(series.steps[start:end])) for start, end in spans)
    return Series(steps, tuple(fmean(series.values[start:end]) for start, end in spans))


def smoothed(series: Series) -> Series:
    """Local linear regression: at each point, a least-squares line through the surrounding tenth of the run.

    A moving average would be biased at the ends, where the window is one-sided.
    """
    reach = max(2, len(series) // 20)
    values = []
    for index in range(len(series)):
        start, end = max(0, index - reach), min(len(series), index + reach + 1)
        values.append(_fitted_value(index - start, series.values[start:end]))
    return Series(series.steps, tuple(values))


def _fitted_value(index: int, values: Sequence[float]) -> float:
    """The value at `index` of the least-squares line through equally spaced values."""
    mean_index, mean = (len(values) - 1) / 2, fmean(values)
    variation = sum((i - mean_index) ** 2 for i in range(len(values)))
    slope = sum((i - mean_index) * value for i, value in enumerate(values)) / variation
    return mean + slope * (index - mean_index)


def _set_y_limits(axes: Axes, curve: Curve) -> None:
    low, high = axes.get_ylim()
    if curve.view is not None:
        low, high = max(low, curve.view[0]), min(high, curve.view[1])
    if curve.from_zero:
        low, high = 0.0, high + 0.1 * max(0.0, high)
    if curve.share:
        low, high = -0.03, 1.03
    axes.set_ylim(low, high)


@contextmanager
def _canvas() -> Generator[tuple[Figure, Axes]]:
    """Empty axes in the report's style. The user's matplotlib settings are ignored and restored afterwards."""
    fonts = logging.getLogger("matplotlib.font_manager")
    level = fonts.level
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(
            {"svg.fonttype": "none", "svg.hashsalt": "proximo", "font.size": POINTS_PER_TEXT, "text.parse_math": False}
        )
        fonts.setLevel(logging.ERROR)  # hides "building the font cache" from the output of a run
        try:
            figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES))
            figure.patch.set_visible(False)
            axes = figure.add_subplot()
            _style(axes)
            yield figure, axes
        finally:
            fonts.setLevel(level)


def _style(axes: Axes) -> None:
    axes.patch.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="y", color=GRID, linewidth=0.7, zorder=0)
    axes.tick_params(colors=MUTED, labelcolor=MUTED, length=0)
    axes.margins(x=0.02, y=0.1)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    axes.set_axisbelow(True)
    axes.set_xlabel("step", color=MUTED)
    axes.title.set_color(INK)


def _tick(number: float, _position: int) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def _set_left_margin(axes: Axes) -> None:
    """Make room for the longest tick label on the left. matplotlib's own layout engine doubles the drawing time."""
    low, high = axes.get_ylim()
    longest = max((len(_tick(number, 0)) for number in axes.get_yticks() if low <= number <= high), default=1)
    margin = 8 + 0.57 * POINTS_PER_TEXT * longest
    left = margin / (72 * WIDTH_INCHES)  # 72 points per inch
    axes.set_position((left, 0.255, 0.985 - left, 0.71))
