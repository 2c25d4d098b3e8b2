"""Binds the parameters of a user's reward function to its inputs by name, and calls it.

An async function runs in an event loop that lives as long as the function. Imports no torch: a dry run binds functions
too.
"""

import asyncio
import functools
import importlib
import inspect
import re
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter, Signature
from typing import Any

from proximo.errors import ConfigError, DataError
from proximo.metrics.definitions import COMPONENT
from proximo.user_code import kept_working_directory
from proximo_verifiers.callables import deferral

PAGE = "docs/rewards.md"
CLOSE_SECONDS = 5.0
"""How long the end of the thread of an event loop is waited for."""
OF_A_BATCH = ("prompts", "responses", "completions", "completion_ids", "metadata")
"""Names of parameters besides the columns of the rows. Each is a list with one entry for each response."""
OF_A_RESPONSE = ("finish", "token_ids")
"""Entries of the metadata that belong to the response and are not columns of its row."""
_OWN = frozenset({"responses", "metadata"})
"""Names that are not TRL's, where a column may have them."""
_NOT_GIVEN = {
    "trainer_state": "a score does not depend on the step; give it a default",
    "log_extra": "return a mapping with score and named components, which are logged; give it a default",
    "log_metric": "return a mapping with score and named components, which are logged; give it a default",
    "environments": "an environment lives in another process; give its class get_reward(), which returns what the "
    "function would read there, such as self.reward, and leave the function out (docs/environments.md)",
}
"""Arguments of TRL's that no function gets here, why, and what to do."""


def import_function(path: str) -> Callable[..., Any]:
    """Imports the function `package.module:function`, or an object with a method `score`.

    Raises ConfigError if there is none.
    """
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise ConfigError(f"a function is named package.module:function, got {path!r}")
    try:
        with kept_working_directory():
            module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise ConfigError(
            f"function {path!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error}); "
            "is it installed or in the folder that you started from, and can it be imported on its own?"
        ) from error
    function = vars(module).get(name)
    if not callable(function) and not hasattr(function, "score"):
        known = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ConfigError(f"function {path!r}: {module_name} has no function {name!r}; it has {', '.join(known[:8])}")
    return function


def bound_import(path: str, kwargs: Mapping[str, Any], *, name: str) -> "BoundFunction | None":
    """The function at an import path, imported and bound; None for an object with a method `score`.

    Raises ConfigError for a path that leads nowhere, and for a function that cannot be bound.
    """
    found = import_function(path)
    is_source = hasattr(found, "score") and not isinstance(found, type)
    return None if is_source else BoundFunction(found, kwargs, name=name)


def function_name(function: Any) -> str:
    """The name of a reward function in metrics: its own name, or `function` for a lambda and other unnamed ones."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return name if re.fullmatch(COMPONENT, name) else "function"


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedColumns:
    """The columns that a function needs in every row."""

    required: tuple[str, ...]
    """Parameters without a default that are columns."""
    ambiguous: tuple[str, ...]
    """Parameters of a function in TRL's form that would be a column there, and are a list of a batch here."""

    replaced: tuple[str, ...]
    """Entries of `OF_A_RESPONSE` that the function gets. They would hide columns of the same names."""

    def problem(self, columns: Collection[str]) -> str | None:
        """Why the function cannot be called with a row of these columns, in a sentence about the function."""
        if hidden := next((name for name in self.replaced if name in columns), None):
            return (
                f"gets the {hidden!r} of the response, not the row's column of that name; rename the column with "
                f"columns in its source ({PAGE})"
            )
        columns = [*columns, *OF_A_RESPONSE]
        if absent := next((name for name in self.required if name not in columns), None):
            known = (*OF_A_BATCH, *columns)
            close = get_close_matches(absent, known, n=1)
            return (
                f"has a parameter {absent!r}, and the row has no such column"
                f"{f' (did you mean {close[0]!r}?)' if close else ''}; it has {', '.join(sorted(columns)) or 'none'}, "
                f"and a parameter may also name {', '.join(OF_A_BATCH)}. Name one of these, give every row the column "
                "(a Prompt of your own has them in metadata), or give the parameter a default, which gives None for a "
                f"row without the column ({PAGE})"
            )
        if doubtful := next((name for name in self.ambiguous if name in columns), None):
            return (
                f"takes completions, as TRL's do, and has a parameter {doubtful!r}: in TRL that is the column of the "
                f"row, here the {doubtful} of the batch; rename the column with columns in its source ({PAGE})"
            )
        return None


class BoundFunction:
    """A reward function that is called with what its parameters name, waited for if it is async.

    A parameter is one of `OF_A_BATCH`, a column of the rows, or one of `kwargs`, which go before a column. `**kwargs`
    get TRL's names (prompts, completions, completion_ids) and all columns. Parameters that a `functools.partial` sets
    keep their values.
    """

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any], *, name: str) -> None:
        """`name` is for messages. Raises ConfigError if a call is certain to fail."""
        self.function = function
        self.name = name
        self.kwargs = dict(kwargs)
        parameters = _parameters(function, name)
        self._positional = [each for each in parameters if each.kind is Parameter.POSITIONAL_ONLY]
        self._takes_all = any(each.kind is Parameter.VAR_KEYWORD for each in parameters)
        self._set = {*self.kwargs, *_set_by_partial(function)}
        named = [each for each in parameters if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
        self._free = {each.name: each for each in named if each.name not in self._set}
        if problem := self._problem({each.name for each in named}):
            raise ConfigError(f"reward function {name} {problem}{'' if '.md' in problem else f' ({PAGE})'}")
        wants_trl = "completions" in self._free or "completion_ids" in self._free
        self.wanted = WantedColumns(
            required=tuple(name for name in self._required if name not in OF_A_BATCH),
            ambiguous=tuple(name for name in self._free if name in _OWN and wants_trl),
            replaced=tuple(name for name in OF_A_RESPONSE if self._takes(name) or "metadata" in self._free),
        )
        self._loop = EventLoop()

    def __call__(
        self,
        prompts: Sequence[Any],
        responses: Sequence[str],
        completions: Sequence[Any],
        metadata: Sequence[Mapping[str, Any]],
        *,
        answers: Sequence[Any],
        columns: Iterable[str] = (),
    ) -> Any:
        """What the function returns for a batch.

        `answers`: the column `answer` as the rows have it; the metadata have a number in it as text. `columns`: those
        of all rows, whichever rows the batch has.

        Raises DataError if it has no column of a name that the function needs.
        """
        known = dict.fromkeys([*columns, *(key for each in metadata for key in each)])
        if problem := self.wanted.problem([name for name in known if name not in OF_A_RESPONSE]):
            raise DataError(f"reward function {self.name} {problem}")
        batch = {
            "prompts": list(prompts),
            "responses": list(responses),
            "completions": list(completions),
            "completion_ids": [list(each["token_ids"]) for each in metadata],
            "metadata": list(metadata),
        }
        lists: dict[str, Any] = {key: [each.get(key) for each in metadata] for key in known}
        lists |= {"answer": list(answers)} if "answer" in known else {}
        lists |= {key: value for key, value in batch.items() if key in self._free or key not in _OWN}
        given = {key: value for key, value in lists.items() if self._takes(key)} | self.kwargs
        leading = [given.pop(each.name, each.default) for each in self._positional]
        results = self.function(*leading, **given)
        return self._loop.wait_for(results) if inspect.isawaitable(results) else results

    def close(self) -> None:
        """Ends the event loop of an async function."""
        self._loop.close()

    @property
    def _required(self) -> list[str]:
        return [name for name, each in self._free.items() if each.default is Parameter.empty]

    def _takes(self, name: str) -> bool:
        return name in self._free or (self._takes_all and name not in self._set)

    def _problem(self, named: Collection[str]) -> str | None:
        if taken := next((key for key in self.kwargs if key in OF_A_BATCH), None):
            return f"gets {taken} with every batch: remove {taken!r} from kwargs"
        if unknown := next((key for key in self.kwargs if key not in named and not self._takes_all), None):
            return f"has no parameter {unknown!r}, which kwargs sets; its parameters: {', '.join(named) or 'none'}"
        if refused := next((name for name in self._required if name in _NOT_GIVEN), None):
            return f"has a parameter {refused!r}, which is not given here: {_NOT_GIVEN[refused]}"
        if not self._free and not self._takes_all:
            return (
                "names nothing that it could score: name its parameters after their contents, "
                f"{', '.join(OF_A_BATCH)}, or columns of the rows"
            )
        return None


def _parameters(function: Any, name: str) -> list[Parameter]:
    if isinstance(function, type):
        problem = f"is the class {function.__name__}, not an object of it: write {function.__name__}(...)"
    elif not callable(function):
        problem = f"is a {type(function).__name__}, which cannot be called"
    elif deferred := deferral(function, may_await=True):
        problem = f"returns no list: {deferred}"
    elif (signature := _signature(function)) is None:
        problem = "has no signature with names: wrap it in a function, such as def score(completions, answer): ..."
    else:
        return list(signature.parameters.values())
    raise ConfigError(f"reward function {name} {problem} ({PAGE})")


def _signature(function: Callable[..., Any]) -> Signature | None:
    """The function's own signature; that of the function it wraps where its own says nothing of names."""
    try:
        own = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some built-in functions have none
        own = None
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    if own is not None and not any(each.kind in variadic for each in own.parameters.values()):
        return own
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _set_by_partial(function: Any) -> set[str]:
    names: set[str] = set()
    while isinstance(function, functools.partial):
        names |= set(function.keywords)
        function = function.func
    return names


class EventLoop:
    """Runs awaitables in one loop, in a thread of its own, which begins with the first of them.

    A client that an async function opens belongs to the loop that it was opened in, so the loop stays the same from
    batch to batch. Several threads may wait at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._end: asyncio.Future[None] | None = None

    def wait_for(self, awaitable: Awaitable[Any]) -> Any:
        """The result of the awaitable. Raises what it raises."""
        return asyncio.run_coroutine_threadsafe(_awaited(awaitable), self._started()).result()

    def close(self) -> None:
        """Cancels what still runs, and ends the thread. A later awaitable begins another one."""
        with self._lock:
            loop, thread, end = self._loop, self._thread, self._end
            self._loop = self._thread = self._end = None
        if loop is None or thread is None or end is None:
            return
        loop.call_soon_threadsafe(end.set_result, None)
        thread.join(CLOSE_SECONDS)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._end = self._loop.create_future()
                self._thread = threading.Thread(
                    target=_run, args=(self._loop, self._end), daemon=True, name="async-reward"
                )
                self._thread.start()
            return self._loop


def _run(loop: asyncio.AbstractEventLoop, end: "asyncio.Future[None]") -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        while not end.done():
            # Such an exception of a task reaches the waiting caller, and the loop too, which continues for others.
            with suppress(SystemExit, KeyboardInterrupt):
                runner.get_loop().run_until_complete(end)


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
