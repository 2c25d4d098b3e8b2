"""Collects the metric values of a step and turns them into one line. Not the writing of that line: see sinks."""

import math
from collections.abc import Mapping

from proximo.metrics.catalogue import catalogue
from proximo.metrics.values import MetricValue, Sum, combine

NON_FINITE = "progress/non_finite_metrics"


class Recorder:
    """The values of the step under way. Values of one name combine by their own rule until the line is taken."""

    def __init__(self) -> None:
        self._catalogue = catalogue()
        self._values: dict[str, MetricValue] = {}
        self._non_finite: tuple[str, ...] = ()

    def record(self, name: str, value: MetricValue) -> None:
        """Add a value. UnknownMetricError for a name that is not declared, TypeError for another reduction."""
        metric = self._catalogue.find(name)
        if type(value) is not metric.reduction:
            raise TypeError(
                f"metric {name!r} is declared as a {metric.reduction.__name__}, and was recorded as a "
                f"{type(value).__name__}"
            )
        known = self._values.get(name)
        self._values[name] = value if known is None else combine(known, value)

    def record_all(self, values: Mapping[str, MetricValue]) -> None:
        """Add several values."""
        for name, value in values.items():
            self.record(name, value)

    @property
    def non_finite(self) -> tuple[str, ...]:
        """The metrics that the last line left out because they were NaN or infinite: worth a warning."""
        return self._non_finite

    def line(self) -> dict[str, float]:
        """The numbers of the step, in the order of the catalogue, and an empty recorder for the next step.

        A value that saw nothing is absent. One that is not finite is absent and counted under
        `progress/non_finite_metrics`: JSON has no NaN, and a curve with one hides all others.
        """
        numbers = {name: value.value for name, value in self._values.items() if value.value is not None}
        self._values = {}
        self._non_finite = tuple(sorted(name for name, number in numbers.items() if not math.isfinite(number)))
        if self._non_finite:
            numbers[NON_FINITE] = Sum(len(self._non_finite)).total
        kept = sorted(numbers.keys() - set(self._non_finite), key=self._catalogue.position)
        return {name: numbers[name] for name in kept}
