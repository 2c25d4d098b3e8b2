"""Raises alarms while a run is under way: a sink that says each of them once, when it first comes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from proximo.metrics.alarms import find_alarms
from proximo.metrics.catalogue import catalogue
from proximo.metrics.console import Course
from proximo.metrics.run_files import Run
from proximo.metrics.sinks import history

CHECKS_PER_RUN = 50
"""From this many steps on, the rules look at the run whenever it has grown by this part of its length."""


class AlarmWatch:
    """Keeps the numbers of all steps but times and memory, and judges them by the rules that the report has.

    `metrics_file` holds the steps before this process. What was wrong by then was said by the process before it, and
    stands in the run's log.
    """

    def __init__(
        self,
        course: Course,
        settings: Mapping[str, Any],
        *,
        metrics_file: Path,
        tell: Callable[[str], None],
    ) -> None:
        self._rules = course.trainer.metrics.rules
        self._settings = settings
        self._total_steps = course.total_steps
        self._tell = tell
        self._lines = [_repeatable(step, metrics) for step, metrics in history(metrics_file)]
        self._judged = len(self._lines)
        self._told = {alarm.title for alarm in find_alarms(self._run(), self._rules)}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of one step, and say what is wrong with the run and was not before."""
        self._lines.append(_repeatable(step, metrics))
        count = len(self._lines)
        if step < self._total_steps and count - self._judged < count // CHECKS_PER_RUN:
            return
        self._judged = count
        for alarm in find_alarms(self._run(), self._rules):
            if alarm.title not in self._told:
                self._told.add(alarm.title)
                self._tell(f"step {step}, {alarm.severity}: {alarm.text}")

    def close(self) -> None: ...

    def _run(self) -> Run:
        lines = tuple(self._lines)
        return Run(name="", lines=lines, config=self._settings, total_steps=self._total_steps)


def _repeatable(step: int, metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Without what no run repeats: an alarm must not depend on the load of the machine."""
    known = ((name, number, catalogue().get(name)) for name, number in metrics.items() if number is not None)
    return {"step": step, **{name: number for name, number, metric in known if metric and metric.repeatable}}
