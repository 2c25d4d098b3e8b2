"""The graph of a step's calls, as data. Each call has a role and names the values that it reads and writes.

The graph is validated when it is built, so that missing values and double writes are found before anything runs.
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
        """Values that the call both reads and writes: it replaces them for all later readers."""
        return tuple(value for value in self.writes if value in self.reads)


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """Calls in topological order: each call comes after the writers of the values that it reads."""

    inputs: tuple[str, ...]
    calls: tuple[Call, ...]


def build_graph(calls: Sequence[Call], *, inputs: Sequence[str]) -> Graph:
    """Sort the calls topologically. Calls that are ready at the same time keep their given order.

    Calls that amend a value run in their given order, and before all its other readers.

    Raises ValueError for two calls with the same name, a value with two writers, a value without a writer, and cycles.
    """
    _check_unique([call.name for call in calls], "call")
    written = (value for call in calls for value in call.writes if value not in call.amends)
    _check_unique([*inputs, *written], "value")
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
    """Values that a waiting call reads and that are not yet written, or not yet amended by all calls that do so."""
    return sorted(v for v in call.reads if v not in known or _next_to_amend(v, waiting) not in (None, call))


def _next_to_amend(value: str, waiting: Sequence[Call]) -> Call | None:
    return next((call for call in waiting if value in call.amends), None)


def _check_unique(names: Sequence[str], kind: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{kind} names must be unique, given more than once: {', '.join(twice)}")
