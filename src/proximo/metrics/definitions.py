"""Declarations: a metric's name, reduction and unit, and the curves of a report.

Recording an undeclared name is an error, so the documentation is always complete. docs/metrics.md defines each metric.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from difflib import get_close_matches
from enum import StrEnum
from functools import cached_property, lru_cache

from proximo.metrics.values import MetricValue

COMPONENT = r"[A-Za-z0-9_.\-]+"
"""Pattern of the name of a score component, which becomes a part of metric names."""


class Better(StrEnum):
    """The direction of improvement."""

    UP = "up"
    DOWN = "down"


UP, DOWN = Better.UP, Better.DOWN


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric: `Metric("sft/loss", Mean, "nats per token", DOWN)`.

    A name with `<component>` is a pattern, in which it stands for one segment of letters, digits, `_.-`.
    """

    name: str
    reduction: type[MetricValue]
    unit: str
    better: Better | None = None
    definition: str = ""
    """Of a metric that docs/metrics.md does not define, since its trainer is of another package; in sentences."""
    repeatable: bool = field(default=True, kw_only=True)
    """False for times and memory, which differ between two runs of the same recipe."""

    @property
    def is_pattern(self) -> bool:
        return "<" in self.name

    def matches(self, name: str) -> bool:
        """True if `name` is this metric's name or matches its pattern."""
        if not self.is_pattern:
            return name == self.name
        before, _, after = self.name.partition("<component>")
        return re.fullmatch(re.escape(before) + COMPONENT + re.escape(after), name) is not None


class UnknownMetricError(LookupError):
    """A value was recorded under an undeclared name: a bug in the code that recorded it."""


@dataclass(frozen=True)
class Catalogue:
    """All declared metrics, in the order of a line of metrics.jsonl."""

    metrics: tuple[Metric, ...]

    def find(self, name: str) -> Metric:
        """The metric that `name` belongs to. Raises UnknownMetricError, with the closest name, if there is none."""
        return self.metrics[self.position(name)[0]]

    def get(self, name: str) -> Metric | None:
        """The metric that `name` belongs to, or None: for reading files that another version may have written."""
        index = self._index(name)
        return None if index is None else self.metrics[index]

    def position(self, name: str) -> tuple[int, str]:
        """A sort key: index of the declaration, then the name, for names that match one pattern.

        Raises as `find` does.
        """
        index = self._index(name)
        if index is None:
            nearest = get_close_matches(name, [metric.name for metric in self.metrics], n=1)
            hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
            raise UnknownMetricError(f"no metric {name!r} is declared{hint}: declare it in the metrics of its trainer")
        return index, name

    @cached_property
    def _index(self) -> Callable[[str], int | None]:
        """A cached function from a name to the index of its metric: a run looks up the same names at every step."""

        def look_up(name: str) -> int | None:
            return next((index for index, metric in enumerate(self.metrics) if metric.matches(name)), None)

        return lru_cache(maxsize=4096)(look_up)

    def repeatable(self, line: Mapping[str, float]) -> dict[str, float]:
        """The metrics of a line that a second run must reproduce bit for bit: all but times and memory."""
        known = ((name, self.get(name)) for name in line)
        return {name: line[name] for name, metric in known if name == "step" or (metric and metric.repeatable)}


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

    def draws(self, *traces: Trace, healthy: str) -> "Curve":
        """The curve with its series, and with the text about healthy runs."""
        return replace(self, traces=traces, healthy=healthy)


def held_out(name: str) -> Trace:
    """The held-out series of a plot of training."""
    return Trace(name, "held out", Style.POINTS)
