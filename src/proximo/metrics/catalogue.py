"""All metrics that may be recorded, gathered from the registered trainers, and the recorder of a step's values.

Sinks write the line of numbers to which the recorder reduces them.
"""

import math
from collections.abc import Iterable, Mapping
from functools import cache

from proximo.metrics.definitions import Catalogue
from proximo.metrics.shared_declarations import RUN
from proximo.metrics.values import MetricValue, Sum, combine
from proximo.trainer_kinds import TrainerKind, trainer_kinds


def catalogue() -> Catalogue:
    """Metrics of all registered trainers and metrics of every run, in the order of a line of metrics.jsonl."""
    return _catalogue_of(trainer_kinds())


@cache
def _catalogue_of(kinds: tuple[TrainerKind, ...]) -> Catalogue:
    training = (metric for kind in kinds for table in kind.metrics.tables.values() for metric in table)
    held_out = (metric for kind in kinds for metric in kind.metrics.evaluation)
    return Catalogue(tuple(dict.fromkeys((*training, *held_out, *RUN))))


def trainer_by_metrics(names: Iterable[str]) -> TrainerKind | None:
    """The trainer that declares most of these metrics, the first in case of a tie; None if none declares any."""
    known = tuple(names)
    counts = {kind: sum(_own(kind).get(name) is not None for name in known) for kind in trainer_kinds()}
    likeliest = max(counts, key=lambda kind: counts[kind], default=None)
    return likeliest if likeliest is not None and counts[likeliest] else None


@cache
def _own(kind: TrainerKind) -> Catalogue:
    return Catalogue(
        (*(metric for table in kind.metrics.tables.values() for metric in table), *kind.metrics.evaluation)
    )


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
