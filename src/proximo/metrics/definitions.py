"""What every metric is: name, unit, definition, how its parts combine. Not the recording of values.

A name that is not declared here cannot be recorded, so the documentation cannot fall behind the code.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import cached_property, lru_cache

from proximo.metrics.values import MetricValue

COMPONENT = r"[A-Za-z0-9_.\-]+"
"""What a named part of a score may be called: it stands in the names of metrics."""


class Better(StrEnum):
    """Which way is good, where one way is."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One declared metric. A name with `<component>` in it is a pattern: one path segment of letters, digits, `_.-`."""

    name: str
    reduction: type[MetricValue]
    unit: str
    definition: str
    better: Better | None = None
    repeatable: bool = True
    """False for what the machine decides (times, memory): left out when two runs are compared."""

    @property
    def is_pattern(self) -> bool:
        return "<" in self.name

    def matches(self, name: str) -> bool:
        """True where `name` is this metric, or one of the names that this pattern stands for."""
        if not self.is_pattern:
            return name == self.name
        before, _, after = self.name.partition("<component>")
        return re.fullmatch(re.escape(before) + COMPONENT + re.escape(after), name) is not None


class UnknownMetricError(LookupError):
    """A value was recorded under a name that nothing declares: a defect of the code that recorded it."""


@dataclass(frozen=True)
class Catalogue:
    """All metrics, by name and in the order in which they are written."""

    metrics: tuple[Metric, ...]

    def find(self, name: str) -> Metric:
        """The metric that `name` belongs to; UnknownMetricError, with the nearest name, where there is none."""
        return self.metrics[self.position(name)[0]]

    def get(self, name: str) -> Metric | None:
        """The metric that `name` belongs to, or None: for reading files that another version may have written."""
        place = self._place(name)
        return None if place is None else self.metrics[place]

    def position(self, name: str) -> tuple[int, str]:
        """A sort key: the order of declaration, then the name (for the members of a pattern). Raises as `find` does."""
        place = self._place(name)
        if place is None:
            nearest = get_close_matches(name, [metric.name for metric in self.metrics], n=1)
            hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
            raise UnknownMetricError(f"no metric {name!r} is declared{hint}: declare it in the metrics of its trainer")
        return place, name

    @cached_property
    def _place(self) -> Callable[[str], int | None]:
        """The place of the metric that a name belongs to. Remembers: a run asks for the same names at every step."""

        def look_up(name: str) -> int | None:
            return next((place for place, metric in enumerate(self.metrics) if metric.matches(name)), None)

        return lru_cache(maxsize=4096)(look_up)

    def repeatable(self, line: Mapping[str, float]) -> dict[str, float]:
        """The part of a line that a second run must reproduce bit for bit: everything but times and memory."""
        return {name: value for name, value in line.items() if name == "step" or self.find(name).repeatable}
