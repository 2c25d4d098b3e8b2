"""Executors run a graph of calls: each call on the worker of its role, calls without a role in the driver process."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from proximo.dataflow.graph import Call, Graph
from proximo.errors import ConfigError

Handler = Callable[..., tuple[Any, ...]]
"""Does the work of a call.

Takes the values that the call reads, by position, and returns a tuple of those it writes.
"""
SideBySide = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Runs functions concurrently and returns their results, in order."""


class Worker(Protocol):
    """The worker of a role: a model on its device, and handlers for the role's calls."""

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Name of a call -> its handler. Other workers that the call needs are passed as keyword arguments, by role."""
        ...


Group = Mapping[str, Worker]
"""Role -> worker, for roles in one process. A call may use several workers of its group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The values and times of one run of a graph."""

    values: Mapping[str, Any]
    seconds: Mapping[str, float]
    """Name of a call -> wall-clock seconds. Concurrent calls divide their joint time in proportion to their own times,
    so that the sum over all calls is the time of the step."""


class Executor(Protocol):
    """Runs the calls of a graph on workers that may be anywhere."""

    def run(
        self,
        graph: Graph,
        inputs: Mapping[str, Any],
        *,
        groups: Sequence[Group],
        driver: Mapping[str, Handler],
        together: Collection[str] = (),
        around: Callable[[Call], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> Outcome:
        """Run all calls. `inputs` must be exactly the inputs of the graph.

        `driver`: handlers of calls without a role. `together`: names of calls that share no state, so that two of them
        may run concurrently. `around`: context manager that is entered for each call.

        Raises ValueError if the inputs are not those of the graph, a call has no handler, or a handler returns the
        wrong number of values; ConfigError for a call that needs roles of several groups.
        """
        ...


class LocalExecutor:
    """Runs calls sequentially in this process, except for pairs of calls that may run concurrently."""

    def __init__(self, *, side_by_side: SideBySide | None = None) -> None:
        """`side_by_side`: runs two calls concurrently; None to run all calls sequentially."""
        self._side_by_side = side_by_side

    def run(
        self,
        graph: Graph,
        inputs: Mapping[str, Any],
        *,
        groups: Sequence[Group],
        driver: Mapping[str, Handler],
        together: Collection[str] = (),
        around: Callable[[Call], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> Outcome:
        """See `Executor.run`.

        Two consecutive calls run concurrently if the second reads nothing that the first writes.
        """
        if set(inputs) != set(graph.inputs):
            raise ValueError(f"the graph takes {sorted(graph.inputs)}, given were {sorted(inputs)}")
        handlers = {call.name: find_handler(call, groups, driver) for call in graph.calls}
        values, seconds, waiting = dict(inputs), {}, list(graph.calls)

        def run(call: Call) -> tuple[tuple[Any, ...], float]:
            """The results of the call and its wall-clock seconds."""
            start = time.perf_counter()
            with around(call):
                results = handlers[call.name](*(values[name] for name in call.reads))
            return results, time.perf_counter() - start

        while waiting:
            start = time.perf_counter()
            calls = waiting[: self._num_next(waiting, together)]
            del waiting[: len(calls)]
            if self._side_by_side is None or len(calls) == 1:
                ran = [run(call) for call in calls]
            else:
                ran = self._side_by_side([partial(run, call) for call in calls])
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

    def _num_next(self, waiting: Sequence[Call], together: Collection[str]) -> int:
        """The number of calls to run next: 2 if the next two may run concurrently, else 1."""
        if self._side_by_side is None or len(waiting) == 1:
            return 1
        first, second = waiting[:2]
        allowed = first.name in together and second.name in together
        return 2 if allowed and set(first.writes).isdisjoint(second.reads) else 1


def find_handler(call: Call, groups: Sequence[Group], driver: Mapping[str, Handler]) -> Handler:
    """The handler of a call. Raises ValueError if there is none, ConfigError if its roles are in different groups."""
    if call.role is None:
        if call.name not in driver:
            raise ValueError(f"call {call.name} has no role, and the driver no handler of that name")
        return driver[call.name]
    group = next((group for group in groups if call.role in group), None)
    if group is None or call.name not in group[call.role].handlers:
        raise ValueError(f"no worker of the role {call.role} handles the call {call.name}")
    if apart := [role for role in call.beside if role not in group]:
        raise ConfigError(
            f"the call {call.name} needs the models of {' and '.join([call.role, *call.beside])} at once, but "
            f"{' and '.join(apart)} is in another group: put these roles into one"
        )
    return partial(group[call.role].handlers[call.name], **{role: group[role] for role in call.beside})
