"""Runs a graph of calls with the handlers that do the work. In this process; others come with the same handlers."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from proximo.dataflow.graph import Graph

Handler = Callable[..., tuple[Any, ...]]
"""Takes what its call reads, by position, and returns what it writes, as a tuple."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Everything that a run of the graph made."""

    values: Mapping[str, Any]
    seconds: Mapping[str, float]
    """Wall-clock seconds of each call, by name."""


class Executor(Protocol):
    """Runs the calls of a graph, wherever the models are."""

    def run(self, inputs: Mapping[str, Any]) -> Outcome:
        """`inputs` holds exactly the graph's inputs."""
        ...


class LocalExecutor:
    """One call after the other, in this process."""

    def __init__(self, graph: Graph, handlers: Mapping[str, Handler]) -> None:
        missing = [call.name for call in graph.calls if call.name not in handlers]
        if missing:
            raise ValueError(f"calls without a handler: {', '.join(missing)}")
        self.graph = graph
        self.handlers = handlers

    def run(self, inputs: Mapping[str, Any]) -> Outcome:
        """Raises ValueError where the inputs are not those of the graph, or a handler returns another count."""
        if set(inputs) != set(self.graph.inputs):
            raise ValueError(f"the graph takes {sorted(self.graph.inputs)}, given were {sorted(inputs)}")
        values, seconds = dict(inputs), {}
        for call in self.graph.calls:
            start = time.perf_counter()
            results = self.handlers[call.name](*(values[name] for name in call.reads))
            seconds[call.name] = time.perf_counter() - start
            if len(results) != len(call.writes):
                raise ValueError(f"call {call.name} writes {call.writes}, its handler returned {len(results)} values")
            values.update(zip(call.writes, results, strict=True))
        return Outcome(values=values, seconds=seconds)
