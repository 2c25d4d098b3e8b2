"""All metrics that may be recorded, gathered from the registered trainers, and recognition of a trainer by them."""

from collections.abc import Iterable
from functools import cache

from proximo.metrics.definitions import Catalogue
from proximo.metrics.shared_declarations import RUN
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
