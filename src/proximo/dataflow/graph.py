"""A step as data: calls, each with a role, what it reads and what it writes. Knows names, not models.

The graph is checked when it is built, so that a missing or doubly written value is found before anything runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One model function call, or one of the driver's own (role None). What it both reads and writes, it amends."""

    name: str
    role: str | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    beside: tuple[str, ...] = ()
    """Further roles that it needs at once, so that they must be in the group of `role`."""

    @property
    def amends(self) -> tuple[str, ...]:
        """Values that it takes from their writer and hands on in another state."""
        return tuple(value for value in self.writes if value in self.reads)


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """Calls in an order in which each finds what it reads."""

    inputs: tuple[str, ...]
    calls: tuple[Call, ...]


def build_graph(calls: Sequence[Call], *, inputs: Sequence[str]) -> Graph:
    """Order the calls by what they read; among calls that are ready the given order is kept.

    A value that is amended reaches its other readers when all that amend it have run, in their given order.

    Raises ValueError for two calls of one name, a value with two writers, or a value that nothing writes
    (also where calls wait for each other in a ring).
    """
    _refuse_twice([call.name for call in calls], "call")
    written = (value for call in calls for value in call.writes if value not in call.amends)
    _refuse_twice([*inputs, *written], "value")
    known, waiting, ordered = set(inputs), list(calls), []
    while waiting:
        ready = next((call for call in waiting if not _lacking(call, known, waiting)), None)
        if ready is None:
            missing = {call.name: _lacking(call, known, waiting) for call in waiting}
            raise ValueError(f"no call can run next; what each still waits for: {missing}")
        waiting.remove(ready)
        ordered.append(ready)
        known.update(ready.writes)
    return Graph(inputs=tuple(inputs), calls=tuple(ordered))


def _lacking(call: Call, known: set[str], waiting: Sequence[Call]) -> list[str]:
    """What a waiting call reads that is not there yet, or not yet as it will be."""
    return sorted(v for v in call.reads if v not in known or _next_to_amend(v, waiting) not in (None, call))


def _next_to_amend(value: str, waiting: Sequence[Call]) -> Call | None:
    return next((call for call in waiting if value in call.amends), None)


def _refuse_twice(names: Sequence[str], kind: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{kind} names must be unique, given more than once: {', '.join(twice)}")
