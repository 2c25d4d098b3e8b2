"""Finds problems of a run from its metrics, by fixed rules. No alarm does not mean that all is well.

Most rules compare fifths of the run: the mean over each fifth of the steps that have the metric. With fewer than five
such steps they raise nothing. One problem shows in many curves at once, so a rule names the alarms that it explains,
and these are shown under it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, pstdev

from proximo.message_text import count_of
from proximo.metrics.run_files import Run, Series

RESTART = "start another run from a checkpoint before it, as model.path (--resume keeps the settings of this one)"
"""What to do after a step that did harm, in advice."""
PATIENCE_STEPS = 200
"""Trend rules apply from this step on, however long the run will be."""


class Severity(StrEnum):
    """How much an alarm matters."""

    PROBLEM = "problem"
    """The run should not continue like this."""
    WARNING = "warning"
    """Something to look at."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check that fired. `advice` replaces the rule's advice if the run's metrics allow a better one."""

    detail: str
    advice: str | None = None


PROBLEM, WARNING = Severity.PROBLEM, Severity.WARNING


@dataclass(frozen=True, slots=True)
class Rule:
    """One possible problem: when it is diagnosed, what to do, and the check.

    Rule("The loss is 0", WARNING, check).worded(when="the loss is 0 in any step", advice="Check the labels.")

    `check` returns the figures as a sentence or a Finding, and None if all is well.
    """

    title: str
    severity: Severity
    check: Callable[[Run], str | Finding | None]
    _: KW_ONLY
    when: str = ""
    advice: str = ""
    trend: bool = False
    """True for a rule that compares the end of the run with its beginning. It applies after half of the steps, or after
    `PATIENCE_STEPS`."""
    explains: tuple[str, ...] = ()
    """Titles of the alarms that this problem causes."""

    def worded(self, *, when: str, advice: str) -> "Rule":
        """The rule with its texts: when it is raised, and what to do."""
        return replace(self, when=when, advice=advice)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """A rule that fired, with the figures."""

    title: str
    detail: str
    advice: str
    severity: Severity
    consequences: tuple["Alarm", ...] = ()
    """Alarms that this one causes."""

    @property
    def text(self) -> str:
        """The alarm in one line, for a terminal."""
        words = f"{self.title}. {self.detail} {self.advice}"
        consequences = ", ".join(alarm.title for alarm in self.consequences)
        return f"{words} It explains: {consequences}." if consequences else words


def find_alarms(run: Run, rules: Sequence[Rule]) -> tuple[Alarm, ...]:
    """The alarms of a run, problems first. An alarm that another one explains is among its `consequences`.

    `rules` are ordered from causes to effects: if two rules explain an alarm, it belongs to the first.
    """
    fired: dict[str, Alarm] = {}
    explained: dict[str, str] = {}
    for rule in rules:
        alarm = _alarm(rule, run) if not rule.trend or _has_settled(run) else None
        if alarm is None:
            continue
        fired[rule.title] = alarm
        for effect in rule.explains:
            explained.setdefault(effect, explained.get(rule.title, rule.title))
    roots = [alarm for title, alarm in fired.items() if title not in explained]
    alarms = [
        replace(root, consequences=tuple(fired[title] for title in fired if explained.get(title) == root.title))
        for root in roots
    ]
    return tuple(sorted(alarms, key=lambda alarm: alarm.severity is not Severity.PROBLEM))


def _alarm(rule: Rule, run: Run) -> Alarm | None:
    try:
        result = rule.check(run)
    except OverflowError:  # the mean of huge scores overflows: nothing to compare
        return None
    if result is None:
        return None
    finding = Finding(result) if isinstance(result, str) else result
    return Alarm(title=rule.title, detail=finding.detail, advice=finding.advice or rule.advice, severity=rule.severity)


def _has_settled(run: Run) -> bool:
    return run.total_steps is None or _steps_taken(run) >= min(run.total_steps / 2, PATIENCE_STEPS)


def fifths(series: Series) -> tuple[float, ...] | None:
    """The mean of each fifth of the points; None for fewer than five points."""
    count = len(series)
    if count < 5:
        return None
    edges = [round(part * count / 5) for part in range(6)]
    return tuple(fmean(series.values[start:end]) for start, end in pairwise(edges))


def fifth_noise(series: Series) -> float:
    """The standard error of the mean of a fifth, from differences of neighbouring points, so that trends cancel."""
    changes = [later - earlier for earlier, later in pairwise(series.values)]
    # The difference of two independent points has sqrt(2) times the deviation of one.
    return pstdev(changes) / math.sqrt(2) / math.sqrt(max(1, len(series) / 5)) if len(changes) > 1 else 0.0


def counted(run: Run, what: str, *names: str) -> str | None:
    """A sentence with the total of count metrics and the steps that have any; None if the total is 0.

    `what`: what is counted, in words. `names`: metrics that are added up.
    """
    totals = [(line["step"], sum(line.get(name, 0.0) for name in names)) for line in run.lines]
    total = sum(number for _, number in totals)
    if total <= 0:
        return None
    at = [step for step, number in totals if number > 0]
    before = ["the evaluation before the first step"] if 0 in at else []
    within = [f"{sum(step > 0 for step in at)} of {count_of(_steps_taken(run), 'step')}"] if max(at) > 0 else []
    return f"{what}: {total:.0f}, in {' and in '.join(before + within)}."


def _steps_taken(run: Run) -> int:
    """Number of training steps. Step 0 has only an evaluation and does not count."""
    return sum(line["step"] > 0 for line in run.lines)
