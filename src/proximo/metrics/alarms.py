"""Says what is wrong with a run from its numbers alone, by fixed rules. Not a judgement that all else is well.

Most rules look at the run in fifths: the mean of each fifth of the steps that have the metric. They are silent where
there are fewer than five, so a run that has just begun raises no alarm. A sickness shows in many curves at once: a rule
names the alarms that it brings about, and these are shown under it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, pstdev

from proximo.metrics.run_files import Run, Series

PATIENCE_STEPS = 200
"""After so many steps a trend is judged, however long the run is to be."""


class Severity(StrEnum):
    """How much an alarm matters."""

    PROBLEM = "problem"
    """The run should not continue like this."""
    WARNING = "warning"
    """Something to look at."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, with advice where the run's own numbers say more than the rule can."""

    detail: str
    advice: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One sickness: when it is diagnosed, what to do, and the check that gives the figures (or None)."""

    title: str
    when: str
    advice: str
    severity: Severity
    check: Callable[[Run], str | Finding | None]
    trend: bool = False
    """True where the end of the run is compared with its beginning: such a rule is silent until half of the steps are
    taken, or `PATIENCE_STEPS`."""
    explains: tuple[str, ...] = ()
    """Titles of alarms that this sickness brings about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """A rule that fired, with the figures that made it."""

    title: str
    detail: str
    advice: str
    severity: Severity
    consequences: tuple["Alarm", ...] = ()
    """Alarms that this one explains."""

    @property
    def text(self) -> str:
        """All of it in one line, for a terminal."""
        words = f"{self.title}. {self.detail} {self.advice}"
        with_it = ", ".join(alarm.title for alarm in self.consequences)
        return f"{words} It explains: {with_it}." if with_it else words


def find_alarms(run: Run, rules: Sequence[Rule]) -> tuple[Alarm, ...]:
    """The rules that fire on the run, problems first, each with the alarms that it explains.

    Rules stand in the order of cause and effect: of two that explain an alarm the first one has it.
    """
    found: dict[str, Alarm] = {}
    explained: dict[str, str] = {}
    for rule in rules:
        alarm = _alarm(rule, run) if not rule.trend or _has_settled(run) else None
        if alarm is None:
            continue
        found[rule.title] = alarm
        for effect in rule.explains:
            explained.setdefault(effect, explained.get(rule.title, rule.title))
    roots = [alarm for title, alarm in found.items() if title not in explained]
    whole = [
        replace(root, consequences=tuple(found[title] for title in found if explained.get(title) == root.title))
        for root in roots
    ]
    return tuple(sorted(whole, key=lambda alarm: alarm.severity is not Severity.PROBLEM))


def _alarm(rule: Rule, run: Run) -> Alarm | None:
    try:
        found = rule.check(run)
    except OverflowError:  # scores near the end of the floating-point numbers have no mean to judge by
        return None
    if found is None:
        return None
    finding = Finding(found) if isinstance(found, str) else found
    return Alarm(title=rule.title, detail=finding.detail, advice=finding.advice or rule.advice, severity=rule.severity)


def _has_settled(run: Run) -> bool:
    return run.total_steps is None or _steps_taken(run) >= min(run.total_steps / 2, PATIENCE_STEPS)


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


def counted(run: Run, what: str, *names: str) -> str | None:
    """How many of what should not happen there were, and in how many steps; None for none."""
    totals = [(line["step"], sum(line.get(name, 0.0) for name in names)) for line in run.lines]
    total = sum(number for _, number in totals)
    if total <= 0:
        return None
    at = [step for step, number in totals if number > 0]
    before = ["the evaluation before the first step"] if 0 in at else []
    within = [f"{sum(step > 0 for step in at)} of {_steps_taken(run)} steps"] if max(at) > 0 else []
    return f"{what}: {total:.0f}, in {' and in '.join(before + within)}."


def _steps_taken(run: Run) -> int:
    """Without the line of step 0, which has an evaluation and no step."""
    return sum(line["step"] > 0 for line in run.lines)
