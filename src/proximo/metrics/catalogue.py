"""All metrics that may be recorded, gathered from the registered trainers, and the line of a step that sinks write."""

import math
from collections.abc import Iterable, Mapping
from functools import cache

from proximo.metrics.definitions import Catalogue
from proximo.metrics.shared_declarations import RUN
from proximo.metrics.values import MetricValue
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


def step_line(*records: Mapping[str, MetricValue]) -> tuple[dict[str, float], list[str]]:
    """The numbers of a step in the order of the catalogue, and the names of those that were NaN or infinite.

    Values under one name combine by their reduction. An empty one is left out. A non-finite one is left out and counted
    under `progress/non_finite_metrics`, since JSON has no NaN and a NaN hides the rest of a curve. Raises
    UnknownMetricError for an undeclared name, TypeError for another reduction than declared.
    """
    known, values = catalogue(), dict[str, MetricValue]()
    for name, value in (item for record in records for item in record.items()):
        declared = known.find(name).reduction
        if type(value) is not declared:
            raise TypeError(
                f"metric {name!r} is declared as a {declared.__name__}, and was recorded as a {type(value).__name__}"
            )
        values[name] = values[name].combine(value) if name in values else value
    numbers = {name: value.value for name, value in values.items() if value.value is not None}
    non_finite = sorted(name for name, number in numbers.items() if not math.isfinite(number))
    if non_finite:
        numbers[NON_FINITE] = len(non_finite)
    kept = sorted(numbers.keys() - set(non_finite), key=known.position)
    return {name: numbers[name] for name in kept}, non_finite
