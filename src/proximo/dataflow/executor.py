"""Runs a graph of calls with the handlers that do the work. In this process; others come with the same handlers."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from proximo.dataflow.graph import Call, Graph

Handler = Callable[..., tuple[Any, ...]]
"""Takes what its call reads, by position, and returns what it writes, as a tuple."""
SideBySide = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Runs some functions at the same time and returns what they return, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Everything that a run of the graph made."""

    values: Mapping[str, Any]
    seconds: Mapping[str, float]
    """Wall-clock seconds of each call, by name. Calls side by side divide the time that they took together, each by
    how long it ran, so that the sum over all calls is the time of the step."""


class Executor(Protocol):
    """Runs the calls of a graph, wherever the models are."""

    def run(self, inputs: Mapping[str, Any]) -> Outcome:
        """`inputs` holds exactly the graph's inputs."""
        ...


class LocalExecutor:
    """One call after the other, in this process; but for two calls at a time that `together` allows."""

    def __init__(
        self,
        graph: Graph,
        handlers: Mapping[str, Handler],
        *,
        together: Collection[str] = (),
        side_by_side: SideBySide = lambda functions: [function() for function in functions],
    ) -> None:
        """`together`: names of calls that may run at the same time, by `side_by_side`, where the graph has one behind
        the other and the second reads nothing that the first writes."""
        missing = [call.name for call in graph.calls if call.name not in handlers]
        if missing:
            raise ValueError(f"calls without a handler: {', '.join(missing)}")
        self.graph = graph
        self.handlers = handlers
        self._together = frozenset(together)
        self._side_by_side = side_by_side

    def run(self, inputs: Mapping[str, Any]) -> Outcome:
        """Raises ValueError where the inputs are not those of the graph, or a handler returns another count."""
        if set(inputs) != set(self.graph.inputs):
            raise ValueError(f"the graph takes {sorted(self.graph.inputs)}, given were {sorted(inputs)}")
        values, seconds, waiting = dict(inputs), {}, list(self.graph.calls)
        while waiting:
            start = time.perf_counter()
            calls = self._next(waiting)
            del waiting[: len(calls)]
            ran = self._run(calls, values)
            own_seconds = sum(own for _, own in ran)
            share = (time.perf_counter() - start) / own_seconds if len(ran) > 1 and own_seconds else 1.0
            for call, (results, own) in zip(calls, ran, strict=True):
                seconds[call.name] = share * own
                if len(results) != len(call.writes):
                    raise ValueError(
                        f"call {call.name} writes {call.writes}, its handler returned {len(results)} values"
                    )
                values.update(zip(call.writes, results, strict=True))
        return Outcome(values=values, seconds=seconds)

    def _next(self, waiting: Sequence[Call]) -> Sequence[Call]:
        together = len(waiting) > 1 and self._together.issuperset(call.name for call in waiting[:2])
        return waiting[:2] if together and set(waiting[0].writes).isdisjoint(waiting[1].reads) else waiting[:1]

    def _run(self, calls: Sequence[Call], values: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], float]]:
        """Of each call what it returned, and its own seconds."""

        def run(call: Call) -> tuple[tuple[Any, ...], float]:
            start = time.perf_counter()
            results = self.handlers[call.name](*(values[name] for name in call.reads))
            return results, time.perf_counter() - start

        if len(calls) == 1:
            return [run(calls[0])]
        return self._side_by_side([lambda call=call: run(call) for call in calls])
