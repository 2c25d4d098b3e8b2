"""A sink that checks the alarm rules during a run and reports each alarm once, when it is first raised."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from proximo.metrics.alarms import find_alarms
from proximo.metrics.catalogue import catalogue
from proximo.metrics.console import ProgressInfo
from proximo.metrics.run_files import Run
from proximo.metrics.sinks import history

CHECKS_PER_RUN = 50
"""After n steps, the rules are checked every n / CHECKS_PER_RUN steps (every step at first), cheap in long runs."""


class AlarmWatch:
    """Keeps the repeatable metrics of all steps and checks them by the rules of the report.

    `metrics_file` holds the steps before this process. Alarms of those steps were reported by the earlier process and
    are not repeated.
    """

    def __init__(
        self,
        info: ProgressInfo,
        settings: Mapping[str, Any],
        *,
        metrics_file: Path,
        report: Callable[[str], None],
    ) -> None:
        self._rules = info.trainer.metrics.rules
        self._settings = settings
        self._total_steps = info.total_steps
        self._report = report
        self._lines = [_repeatable(step, metrics) for step, metrics in history(metrics_file)]
        self._num_checked = len(self._lines)
        self._reported = {alarm.title for alarm in find_alarms(self._run(), self._rules)}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step, and report alarms that are new."""
        self._lines.append(_repeatable(step, metrics))
        count = len(self._lines)
        if step < self._total_steps and count - self._num_checked < count // CHECKS_PER_RUN:
            return
        self._num_checked = count
        for alarm in find_alarms(self._run(), self._rules):
            if alarm.title not in self._reported:
                self._reported.add(alarm.title)
                self._report(f"step {step}, {alarm.severity}: {alarm.text}")

    def close(self) -> None: ...

    def _run(self) -> Run:
        lines = tuple(self._lines)
        return Run(name="", lines=lines, config=self._settings, total_steps=self._total_steps)


def _repeatable(step: int, metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The step's metrics without times and memory: an alarm must not depend on the load of the machine."""
    known = ((name, number, catalogue().get(name)) for name, number in metrics.items() if number is not None)
    return {"step": step, **{name: number for name, number, metric in known if metric and metric.repeatable}}
