"""Runs a graph of calls: each where the worker of its role is, those without a role in the driver.

In this process; others come with the same handlers.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from proximo.dataflow.graph import Call, Graph
from proximo.errors import ConfigError

Handler = Callable[..., tuple[Any, ...]]
"""Takes what its call reads, by position, and returns what it writes, as a tuple."""
SideBySide = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Runs some functions at the same time and returns what they return, in their order."""


class Worker(Protocol):
    """One role: a model where it lives, and what it does in a step."""

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By the name of the call. Workers that a call needs beside its own are handed in as keywords, by role."""
        ...


Group = Mapping[str, Worker]
"""Role -> worker, of the roles that are in one place, so that a call may use several of them at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Everything that a run of the graph made."""

    values: Mapping[str, Any]
    seconds: Mapping[str, float]
    """Wall-clock seconds of each call, by name. Calls side by side divide the time that they took together, each by
    how long it ran, so that the sum over all calls is the time of the step."""


class Executor(Protocol):
    """Runs the calls of a graph, wherever the models are."""

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
        """Everything that the calls made of `inputs`, which are exactly the graph's.

        `driver`: handlers of the calls without a role. `together`: names of calls that touch nothing in common, so that
        two of them may run at the same time. `around` is entered for each call.

        Raises ValueError where the inputs are not those of the graph, nothing handles a call, or a handler returns
        another count; ConfigError for a call that needs roles of several groups.
        """
        ...


class LocalExecutor:
    """One call after the other, in this process; but for two at a time that may run together."""

    def __init__(self, *, side_by_side: SideBySide | None = None) -> None:
        """`side_by_side` runs two calls at the same time; None for no such thing."""
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
        """See `Executor.run`. Two calls run together where one follows the other and reads nothing that it writes."""
        if set(inputs) != set(graph.inputs):
            raise ValueError(f"the graph takes {sorted(graph.inputs)}, given were {sorted(inputs)}")
        handlers = {call.name: find_handler(call, groups, driver) for call in graph.calls}
        values, seconds, waiting = dict(inputs), {}, list(graph.calls)

        def run(call: Call) -> tuple[tuple[Any, ...], float]:
            """What it returned, and its own seconds."""
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
        """How many calls run next: 2 or 1."""
        if self._side_by_side is None or len(waiting) == 1:
            return 1
        first, second = waiting[:2]
        allowed = first.name in together and second.name in together
        return 2 if allowed and set(first.writes).isdisjoint(second.reads) else 1


def find_handler(call: Call, groups: Sequence[Group], driver: Mapping[str, Handler]) -> Handler:
    """What does the work of a call. Raises ValueError where there is none, ConfigError where its roles are apart."""
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
