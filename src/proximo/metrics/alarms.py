"""Says what is wrong with a run from its numbers alone, by fixed rules. Not a judgement that all else is well.

A rule looks at the run in fifths: the mean of each fifth of the steps that have the metric. It is silent where there
are fewer than five, so a run that has just begun raises no alarm.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, pstdev

from proximo.metrics.formatting import format_number
from proximo.metrics.run_files import Run, Series


class Severity(StrEnum):
    """How much an alarm matters."""

    PROBLEM = "problem"
    """The run should not go on like this."""
    WARNING = "warning"
    """Worth a look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One sickness: when it is diagnosed, what to do, and the check that gives the figures (or None)."""

    title: str
    when: str
    advice: str
    severity: Severity
    check: Callable[[Run], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """A rule that fired, with the figures that made it."""

    title: str
    detail: str
    advice: str
    severity: Severity


def find_alarms(run: Run, rules: Sequence[Rule]) -> tuple[Alarm, ...]:
    """The rules that fire on the run, problems first."""
    found = []
    for rule in rules:
        detail = rule.check(run)
        if detail is not None:
            found.append(Alarm(title=rule.title, detail=detail, advice=rule.advice, severity=rule.severity))
    return tuple(sorted(found, key=lambda alarm: alarm.severity is not Severity.PROBLEM))


def fifths(series: Series) -> tuple[float, ...] | None:
    """The mean of each fifth of the points; None with fewer than five."""
    count = len(series)
    if count < 5:
        return None
    edges = [round(part * count / 5) for part in range(6)]
    return tuple(fmean(series.values[start:end]) for start, end in pairwise(edges))


def fifth_noise(series: Series) -> float:
    """The standard error of the mean of a fifth, from how much neighbouring points differ (trends cancel)."""
    steps = [later - earlier for earlier, later in pairwise(series.values)]
    return pstdev(steps) / math.sqrt(2) / math.sqrt(max(1, len(series) / 5)) if len(steps) > 1 else 0.0


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's correlation; None where one side does not vary."""
    first, second = [left for left, _ in pairs], [right for _, right in pairs]
    spread = pstdev(first) * pstdev(second)
    if spread == 0:
        return None
    mean_first, mean_second = fmean(first), fmean(second)
    return fmean((left - mean_first) * (right - mean_second) for left, right in pairs) / spread


def counted(run: Run, *names: str) -> str | None:
    """How often something that should not happen did, over the whole run; None for never."""
    total = sum(sum(run.series(name).values) for name in names)
    return f"{format_number(total)} in {len(run.lines)} steps." if total > 0 else None
