"""A step as data: calls, each with a role, what it reads and what it writes. Knows names, not models.

The graph is checked when it is built, so that a missing or doubly written value is found before anything runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One model function call, or a pure one (role None)."""

    name: str
    role: str | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """Calls in an order in which each finds what it reads."""

    inputs: tuple[str, ...]
    calls: tuple[Call, ...]


def build_graph(calls: Sequence[Call], *, inputs: Sequence[str]) -> Graph:
    """Order the calls by what they read; among calls that are ready the given order is kept.

    Raises ValueError for two calls of one name, a value with two writers, or a value that nothing writes
    (also where calls wait for each other in a ring).
    """
    _refuse_twice([call.name for call in calls], "call")
    _refuse_twice([*inputs, *(value for call in calls for value in call.writes)], "value")
    known, waiting, ordered = set(inputs), list(calls), []
    while waiting:
        ready = next((call for call in waiting if known.issuperset(call.reads)), None)
        if ready is None:
            missing = {call.name: sorted(set(call.reads) - known) for call in waiting}
            raise ValueError(f"no call can run next; what each still waits for: {missing}")
        waiting.remove(ready)
        ordered.append(ready)
        known.update(ready.writes)
    return Graph(inputs=tuple(inputs), calls=tuple(ordered))


def _refuse_twice(names: Sequence[str], kind: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{kind} names must be unique, given more than once: {', '.join(twice)}")
