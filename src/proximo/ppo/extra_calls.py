"""User-defined calls in the graph of a PPO step: their declaration, checks and handlers."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from proximo.config.ppo.options import PPOConfig
from proximo.dataflow.executor import Handler
from proximo.dataflow.graph import Call, Graph
from proximo.distributed.world import current
from proximo.errors import ConfigError
from proximo.metrics.definitions import COMPONENT
from proximo.ppo.graph import OWN_CALLS, step_graph
from proximo.rewards.dense import is_list
from proximo_verifiers.callables import calling_problem


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraCall:
    """A function that runs in every step as one call of its graph (docs/dataflow.md).

    Its names decide what it does. A call that writes a new value adds to the step. A call that reads and writes the
    same value replaces that value for all other readers. A call with the name of one of the graph's calls replaces that
    call.
    """

    name: str
    reads: tuple[str, ...] = ()
    """Names of the values that are passed to the function, by position."""
    writes: tuple[str, ...] = ()
    """Names of the returned values: one value, or a tuple for several names.

    A number is also a metric, `extra/NAME`.
    """
    function: Handler
    """Must not modify its arguments; it returns new values."""

    def run(self, *values: Any) -> tuple[Any, ...]:
        """Call the function and return its values as a tuple, as executors expect of a handler."""
        result = self.function(*values)
        match len(self.writes):
            case 0:
                return ()
            case 1:
                return (result,)
        return tuple(result)


def check_extra_calls(extras: Sequence[ExtraCall], config: PPOConfig) -> None:
    """Raises ConfigError if the calls do not fit into the graph of a step. The message lists the step's values."""
    _check_functions(extras)
    graphs = [step_graph(config, reuse_sampled=serve) for serve in (True, False)]
    own = {call.name: call for graph in graphs for call in graph.calls}
    for extra in extras:
        if extra.name in OWN_CALLS and extra.name not in own:
            raise ConfigError(f"extra call {extra.name}: this configuration has no call with that name to replace")
        if extra.name in own and set(extra.writes) != set(own[extra.name].writes):
            raise ConfigError(
                f"extra call {extra.name} replaces a call of the step and must write the same values: "
                f"{', '.join(own[extra.name].writes)}; got {', '.join(extra.writes) or 'nothing'}"
            )
    try:
        for serve in (True, False):
            step_graph(config, reuse_sampled=serve, extra=calls_of(extras))
    except ValueError as error:
        there = sorted({*graphs[0].inputs, *(value for call in graphs[0].calls for value in call.writes)})
        raise ConfigError(
            f"the extra calls do not fit into the graph: {error}; values of a step: {', '.join(there)}"
        ) from error


def _check_functions(extras: Sequence[ExtraCall]) -> None:
    """Raises ConfigError for items that are not ExtraCall, invalid names, and functions with the wrong signature."""
    if isinstance(extras, ExtraCall) or not is_list(extras):
        raise ConfigError(f"extra_calls must be a list of ExtraCall, got {type(extras).__name__}: put it in a list")
    for extra in extras:
        if not isinstance(extra, ExtraCall):
            raise ConfigError(
                f"extra_calls must be a list of ExtraCall, it holds a {type(extra).__name__}: write "
                "ExtraCall(name=..., reads=(...), writes=(...), function=...)"
            )
        if isinstance(extra.reads, str) or isinstance(extra.writes, str):
            raise ConfigError(f"extra call {extra.name}: reads and writes are tuples of names; write (name,) for one")
        wrong = [name for name in (extra.name, *extra.writes) if re.fullmatch(COMPONENT, str(name)) is None]
        if wrong:
            raise ConfigError(
                f"extra call {extra.name!r}: a name is letters, digits, '_', '.' and '-', got {wrong[0]!r}"
            )
        if problem := calling_problem(extra.function, [None] * len(extra.reads), names=extra.reads):
            reads = ", ".join(extra.reads) or "nothing"
            raise ConfigError(f"extra call {extra.name}: its function is called with {reads}, but {problem}")


def calls_of(extras: Sequence[ExtraCall]) -> tuple[Call, ...]:
    """The calls as graph nodes, without a role."""
    return tuple(Call(name=extra.name, role=None, reads=extra.reads, writes=extra.writes) for extra in extras)


def handlers_of(extras: Sequence[ExtraCall]) -> dict[str, Handler]:
    """Name of a call -> its handler. Rank 0 alone calls the function, and every rank gets the values."""
    return {extra.name: partial(_run_once, extra) for extra in extras}


def _run_once(extra: ExtraCall, *values: Any) -> tuple[Any, ...]:
    return current().once(lambda: extra.run(*values), what=f"the extra call {extra.name}")


def values_of(extras: Sequence[ExtraCall], graph: Graph, values: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value that the extra calls of this step wrote."""
    ran = {call.name for call in graph.calls}
    return {name: values[name] for extra in extras if extra.name in ran for name in extra.writes}


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among the values, which become metrics."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
