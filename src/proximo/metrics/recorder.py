"""Collects the metric values of a step and reduces them to one line of numbers. Sinks write the line."""

import math
from collections.abc import Mapping

from proximo.metrics.catalogue import catalogue
from proximo.metrics.values import MetricValue, Sum, combine

NON_FINITE = "progress/non_finite_metrics"


class Recorder:
    """The metric values of the current step.

    Values under one name combine by their reduction until `line` is called.
    """

    def __init__(self) -> None:
        self._catalogue = catalogue()
        self._values: dict[str, MetricValue] = {}
        self._non_finite: tuple[str, ...] = ()

    def record(self, name: str, value: MetricValue) -> None:
        """Add a value.

        Raises UnknownMetricError for an undeclared name, TypeError for another reduction than declared.
        """
        metric = self._catalogue.find(name)
        if type(value) is not metric.reduction:
            raise TypeError(
                f"metric {name!r} is declared as a {metric.reduction.__name__}, and was recorded as a "
                f"{type(value).__name__}"
            )
        earlier = self._values.get(name)
        self._values[name] = value if earlier is None else combine(earlier, value)

    def record_all(self, values: Mapping[str, MetricValue]) -> None:
        """Add several values, by the names of their metrics."""
        for name, value in values.items():
            self.record(name, value)

    @property
    def non_finite(self) -> tuple[str, ...]:
        """Names of the metrics that the last line left out because they were NaN or infinite."""
        return self._non_finite

    def line(self) -> dict[str, float]:
        """Returns the numbers of the step in the order of the catalogue, and resets the recorder.

        An empty value is left out. A non-finite one is left out and counted under `progress/non_finite_metrics`, since
        JSON has no NaN and a NaN hides the rest of a curve.
        """
        numbers = {name: value.value for name, value in self._values.items() if value.value is not None}
        self._values = {}
        self._non_finite = tuple(sorted(name for name, number in numbers.items() if not math.isfinite(number)))
        if self._non_finite:
            numbers[NON_FINITE] = Sum(len(self._non_finite)).total
        kept = sorted(numbers.keys() - set(self._non_finite), key=self._catalogue.position)
        return {name: numbers[name] for name in kept}
