"""Which curves a report shows, and what each looks like in a healthy run. Not how they are drawn."""

from dataclasses import dataclass
from enum import StrEnum


class Section(StrEnum):
    """Where in the report a curve stands."""

    MAIN = "main"
    SPEED = "speed"
    MORE = "more"


class Style(StrEnum):
    """How a series is drawn."""

    LINE = "line"
    """A line through all steps, smoothed where there are many."""
    POINTS = "points"
    """A mark at each of few steps: held-out evaluations."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One series of a curve. A name with `<component>` stands for every metric of that pattern."""

    name: str
    label: str
    style: Style = Style.LINE


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One picture of the report."""

    key: str
    title: str
    unit: str
    traces: tuple[Trace, ...]
    healthy: str
    """What it looks like when all is well, and what it means when it does not."""
    section: Section = Section.MAIN
    view: tuple[float, float] | None = None
    """The lowest and highest value that the picture ever shows: one early outlier must not flatten the rest."""
    share: bool = False
    """True for a part of a whole: the picture goes from 0 to 1, so that 0.98 and 0.99 look alike."""
    from_zero: bool = False
    """True where the picture would mislead without its zero."""
    guide: float | None = None
    """A dotted line to compare with."""
    stacked: bool = False


def held_out(name: str) -> Trace:
    """The evaluations that belong to a curve of training."""
    return Trace(name, "held out", Style.POINTS)
