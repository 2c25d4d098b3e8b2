"""The calls of a PPO step: each is run, timed, named in errors, and traced with the calls whose results it reads."""

import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, Literal, TypeVar

from proximo.distributed.world import current
from proximo.errors import ConfigError
from proximo.metrics.definitions import COMPONENT
from proximo.rewards.source import is_list
from proximo.run.memory import memory_advice
from proximo.user_code import user_errors_named
from proximo_verifiers.callables import calling_problem

Value = TypeVar("Value")
LOG = logging.getLogger("proximo.ppo")
PHASES: Final = {
    "generate": "sampling responses",
    "generate_greedy": "sampling the most likely responses",
    "score": "scoring responses",
    "reference_logprobs": "log-probs of the reference",
    "policy_logprobs": "log-probs of the policy",
    "policy_logprobs_and_values": "log-probs and values",
    "values": "values",
    "train_value": "training the value model",
    "train_policy": "training the policy",
    "train_policy_and_value": "training policy and value",
    "push_weights": "pushing weights",
}
"""Call -> what the progress of a run shows while it runs. Calls that take next to no time are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedCall:
    """One call that a step made."""

    name: str
    role: str | None
    """The role whose worker does it; None for pure computation in the trainer's process."""
    reads: tuple[str, ...]
    """Calls, and inputs of the step, whose results it was given."""
    beside: tuple[str, ...] = ()
    """Further roles whose models it needs at once."""
    num_inputs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnCall:
    """A function of yours at one of the calls of every step (docs/dataflow.md).

    It must not modify what it is given. On several ranks it runs on rank 0 alone, and every rank gets its result.
    """

    at: str
    """The name of the step's call."""
    function: Callable[..., Any]
    does: Literal["replace", "amend", "measure"] = "amend"
    """`replace`: it gets the inputs of the call, and returns its result. `amend`: it gets the result and the inputs,
    and returns the result that the step goes on with. `measure`: it gets the same, and returns numbers by name, which
    become metrics `extra/NAME`."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def is_instead_of(self, call: str) -> bool:
        """Whether it takes the place of a call of the step."""
        return self.at == call and self.does == "replace"


class Calls:
    """Runs the calls of one step, here and in order. A subclass may run them elsewhere, or look at each.

    `trace`: the calls that were made, in order. `seconds`: name -> wall-clock seconds. `measured`: name -> number of
    calls of yours that measure; `own_seconds`: seconds of all calls of yours.
    """

    def __init__(
        self, *, step: int, memory_settings: str, models: Mapping[str, Any], own: Sequence[OwnCall] = ()
    ) -> None:
        """`step` counts from 1. `models`: role -> worker."""
        self.trace: list[TracedCall] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.own_seconds = 0.0
        self.measured: dict[str, float] = {}
        self._step = step
        self._memory_settings = memory_settings
        self._own = own
        self._roles = {id(worker): role for role, worker in models.items() if worker is not None}
        self._made: dict[int, tuple[str, Any]] = {}
        """Identity of a value -> the call that made it, and the value itself, so that no other one takes its place."""

    def input(self, name: str, value: Value) -> Value:
        """The value, known from here on as an input of the step."""
        self._note(name, value)
        return value

    def __call__(self, name: str, role: str | None, function: Callable[..., Any], *inputs: Any) -> Any:
        """The result of `function(*inputs)`, after the calls of yours that have a say in it."""
        self.trace.append(self._traced(name, role, inputs))
        replacing = [own for own in self._own if own.is_instead_of(name)]
        start = time.perf_counter()
        if name in PHASES:
            LOG.info(PHASES[name], extra={"phase": True})
        with memory_advice(self._memory_settings, name, step=self._step):
            result = self._run_own(replacing[-1], *inputs) if replacing else self.run(name, function, *inputs)
        self.seconds[name] += time.perf_counter() - start
        for own in self._own:
            if own.at == name and own.does != "replace":
                result = self._after(own, result, inputs)
        self._note(name, result)
        return result

    def forget_values(self) -> None:
        """Let the values go, which no later call reads."""
        self._made.clear()

    def run(self, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """Do the work of a call."""
        del name
        return function(*inputs)

    def _after(self, own: OwnCall, result: Any, inputs: Sequence[Any]) -> Any:
        start = time.perf_counter()
        found = self._run_own(own, result, *inputs)
        self.own_seconds += time.perf_counter() - start
        if own.does == "amend":
            return found
        self.measured |= _numbers(own, found)
        return result

    def _run_own(self, own: OwnCall, *given: Any) -> Any:
        def run() -> Any:
            with user_errors_named(f"the call {own.name} of yours at {own.at}", own.function):
                return own.function(*given)

        return current().on_rank_0(run, what=f"the call {own.name} of yours at {own.at}")

    def _note(self, name: str, value: Any) -> None:
        for each in (value, *_fields(value)):
            if not (isinstance(each, _NO_IDENTITY) or each is _EMPTY):
                self._made[id(each)] = (name, each)

    def _traced(self, name: str, role: str | None, inputs: Sequence[Any]) -> TracedCall:
        reads = dict.fromkeys(origin for value in inputs for origin in self._origins(value))
        beside = tuple(self._roles[id(value)] for value in inputs if id(value) in self._roles)
        return TracedCall(name=name, role=role, reads=tuple(reads), beside=beside, num_inputs=len(inputs))

    def _origins(self, value: Any) -> list[str]:
        """The calls and inputs that a value comes from, whole or in its parts."""
        if isinstance(value, Unknown):
            return [] if id(value) in self._roles else [value._origin]
        if id(value) in self._made:
            return [self._made[id(value)][0]]
        parts = value if isinstance(value, list) else _fields(value)
        known = [part for part in parts if isinstance(part, Unknown) or id(part) in self._made]
        return [origin for part in known for origin in self._origins(part)]


class Unknown:
    """Stands for a value of a step that is traced and not run, or for a part of one."""

    def __init__(self, origin: str) -> None:
        """`origin`: the call that would have made it, or the input of the step that it stands for."""
        self._origin = origin

    def __getattr__(self, name: str) -> "Unknown":
        return Unknown(self._origin)


class TracingCalls(Calls):
    """Makes no call: it notes which ones a step would make."""

    def __call__(self, name: str, role: str | None, function: Callable[..., Any], *inputs: Any) -> Any:
        """What stands for the result."""
        del function
        self.trace.append(self._traced(name, role, inputs))
        return Unknown(name)


_NO_IDENTITY: Final = (int, float, str, type(None))
"""Equal values of these types may be one object, whatever made them."""
_EMPTY: Final = ()
"""There is only one empty tuple."""


def _fields(value: Any) -> list[Any]:
    """The fields of a record."""
    if isinstance(value, tuple):
        return list(value) if hasattr(value, "_fields") else []
    return [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else []


def check_own_calls(own: Sequence[OwnCall], known: Mapping[str, int]) -> None:
    """Raises ConfigError for a call of yours that is none, at a call that no step makes, or with a wrong signature.

    `known`: call of this configuration's steps -> number of its inputs.
    """
    if not is_list(own) or not all(isinstance(each, OwnCall) for each in own):
        raise ConfigError(f'own_calls must be a list of OwnCall(at="score", function=...), got {own!r:.80}')
    for each in own:
        if each.does not in ("replace", "amend", "measure"):
            raise ConfigError(f"own call {each.name}: does must be replace, amend or measure, got {each.does!r}")
        if each.at not in known:
            raise ConfigError(
                f"own call {each.name}: the steps of this configuration have no call {each.at!r}; they have "
                f"{', '.join(known)}"
            )
        if each.does == "replace" and sum(own_call.is_instead_of(each.at) for own_call in own) > 1:
            raise ConfigError(f"own calls: two of them replace the call {each.at}: keep one, and let others amend it")
        given = [None] * (known[each.at] + (each.does != "replace"))
        if problem := calling_problem(each.function, given):
            raise ConfigError(f"own call {each.name} at {each.at}: it gets {len(given)} values, but {problem}")


def _numbers(own: OwnCall, found: Any) -> dict[str, float]:
    """What a call of yours measured; None counts as nothing. Raises ConfigError for anything but numbers by name."""
    found = {} if found is None else found
    if not isinstance(found, Mapping) or not all(
        re.fullmatch(COMPONENT, str(name)) and hasattr(number, "__float__") and not isinstance(number, bool)
        for name, number in found.items()
    ):
        raise ConfigError(
            f"own call {own.name} at {own.at} measures: it must return numbers by names of letters, digits, '_', '.' "
            f"and '-', such as {{\"longest\": 12}}, or None; got {found!r:.80}"
        )
    numbers = {name: float(number) for name, number in found.items()}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}
