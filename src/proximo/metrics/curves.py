"""Declares the curves of a report, with a description of a healthy run. Drawn by report/plots.py."""

from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum


class Section(StrEnum):
    """The part of the report that a curve belongs to."""

    MAIN = "main"
    SPEED = "speed"
    MORE = "more"


class Style(StrEnum):
    """The style of a series."""

    LINE = "line"
    """A line through all steps, with a smoothed line if there are many."""
    POINTS = "points"
    """A marker at each point, for held-out evaluations."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One series of a plot: a metric's name and its label.

    A name with `<component>` expands to all matching metrics.
    """

    name: str
    label: str
    style: Style = Style.LINE


@dataclass(frozen=True, slots=True)
class Curve:
    """One plot of the report.

    Curve("loss", "Loss", "nats").draws(Trace("sft/loss", "training"), held_out("evaluation/loss"), healthy="Falls.")
    """

    key: str
    title: str
    unit: str
    _: KW_ONLY
    traces: tuple[Trace, ...] = ()
    healthy: str = ""
    """What the plot looks like in a healthy run, and what deviations mean."""
    section: Section = Section.MAIN
    view: tuple[float, float] | None = None
    """Bounds of the y axis. Values beyond are cut off, so that one early outlier does not flatten the rest."""
    share: bool = False
    """True for a fraction: the y axis goes from 0 to 1, so that small differences look small."""
    from_zero: bool = False
    """True if the y axis must include 0."""
    guide: float | None = None
    """Height of a dotted reference line."""
    stacked: bool = False

    def draws(self, *traces: Trace, healthy: str) -> "Curve":
        """The curve with its series, and with the text about healthy runs."""
        return replace(self, traces=traces, healthy=healthy)


def held_out(name: str) -> Trace:
    """The held-out series of a plot of training."""
    return Trace(name, "held out", Style.POINTS)
