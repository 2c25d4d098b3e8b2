"""One environment at play: calls it, checks what it answers, and says what went wrong. Runs where the environment does.

That is a worker process or a thread. Requests and replies are plain values that JSON can hold. Imports no torch.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import random
import reprlib
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from proximo.errors import ConfigError, ProximoError
from proximo.user_code import error_text, where_raised
from proximo_verifiers.callables import calling_problem, methods_problem
from proximo_verifiers.errors import VerifierError
from proximo_verifiers.workers.services import encodable, one_line

MakeEnvironment = Callable[[], Any]
MakeMaker = TypeVar("MakeMaker", bound=Callable[..., MakeEnvironment])
METHODS = ("reset(seed=..., row=...)", "step(text)")
TOOLS_ADVICE = (
    "; a class whose public methods are tools has none: it is given as kind: tools in a recipe, and in Python as "
    "PythonEnvironment(make=..., tools=True)"
)
MAX_ANSWER_CHARACTERS = 2**22
"""Largest observation or info, as text. What is longer is a flood, and a fault."""


class InvalidAnswerError(Exception):
    """An environment answered with a wrong type, or with too much."""


def prepares(function: MakeMaker) -> MakeMaker:
    """Marks a function that is called once, before players are forked, and returns what makes environments.

    It may import and read what all of them share.
    """
    vars(function)["prepares"] = True
    return function


def environment_maker(path: str, options: Mapping[str, Any]) -> MakeEnvironment:
    """What makes an environment: the class or function at `package.module:Class` or `file.py:Class`, with its options.

    Raises ConfigError if there is none, if it cannot be called with these options, or if it cannot be prepared.
    """
    make = imported(path)
    if problem := calling_problem(make, keywords=options):
        given = ", ".join(options) or "no options"
        raise ConfigError(f"environment {path!r} is made with {given}, but {problem}")
    return make(**options) if hasattr(make, "prepares") else lambda: make(**options)


def imported(path: str) -> Callable[..., Any]:
    """The class or function at a path. Raises ConfigError if there is none, MissingExtraError if a package lacks."""
    place, _, name = path.rpartition(":")
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ProximoError, VerifierError):
        raise
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise ConfigError(f"environment {path!r}: {place} cannot be imported ({_described(error)})") from error
    make = getattr(module, name, None)
    if not callable(make):
        raise ConfigError(f"environment {path!r}: {place} has no class or function {name!r}")
    return make


def _module_of_file(file: Path) -> ModuleType:
    name = f"environment_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None or not file.is_file():
        raise FileNotFoundError(f"there is no such file below {Path.cwd()}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Player:
    """Holds one environment, which plays one episode after another."""

    def __init__(self, make: MakeEnvironment, *, owns_process: bool) -> None:
        """`owns_process`: the global generators of random numbers are its own, and each episode seeds them."""
        self._make = make
        self._owns_process = owns_process
        self._environment: Any = None
        self._loop = asyncio.Runner()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a request: `value` and `seconds`, or the reason of a fault as `raised`, with its `kind`.

        Requests: {"call": "make"}, {"call": "reset", "seed": ..., "row": ...}, {"call": "step", "text": ...}.
        """
        start = time.perf_counter()
        try:
            value = self._value(request)
        except InvalidAnswerError as error:
            return {"raised": one_line(str(error)), "kind": "invalid"}
        except MemoryError:
            self._environment = None  # frees what the next lines need
            return {"raised": f"{request['call']}() ran out of memory", "kind": "memory"}
        except BaseException as error:  # an environment may raise anything, SystemExit too
            method = getattr(self._environment, request["call"], None)
            called = f"{request['call']}() raised " if method else "it cannot be made: "
            return {"raised": one_line(called + _described(error, method)), "kind": "error"}
        return {"value": value, "seconds": time.perf_counter() - start}

    def close(self) -> None:
        """Calls the environment's own `close`, if it has one."""
        with suppress(Exception):  # it is at its end, and nobody would read this
            if hasattr(self._environment, "close"):
                self._call(self._environment.close)
            self._loop.close()

    def _value(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        if request["call"] == "make":
            self._environment = self._make()
            if problem := methods_problem(self._environment, METHODS, may_await=True):
                advice = "" if hasattr(self._environment, "step") else TOOLS_ADVICE
                raise ConfigError(f"an environment needs {' and '.join(METHODS)}, but {problem}{advice}")
            return None
        if request["call"] == "reset":
            if self._owns_process:
                _seed_everything(request["seed"])
            return checked_reset(self._call(self._environment.reset, seed=request["seed"], row=request["row"]))
        return checked_step(self._call(self._environment.step, request["text"]))

    def _call(self, method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        answer = method(*arguments, **keywords)
        return self._loop.run(_awaited(answer)) if inspect.isawaitable(answer) else answer


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _seed_everything(seed: int) -> None:
    """Seeds the generators that environments share with all code of the process."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _described(error: BaseException, function: Any = None) -> str:
    if isinstance(error, ProximoError | VerifierError):
        return str(error)
    return f"{error_text(error)} ({where_raised(error, function)})"


_WANTED = {
    "observation": "a text, or a list of messages with a role and content that is a text or parts of type text",
    "reward": "a finite number",
    "terminated": "True or False",
    "truncated": "True or False",
    "info": "a mapping",
    "info['tools']": "a list of JSON schemas, {'type': 'function', 'function': {'name': ..., 'parameters': ...}}",
}


def checked_reset(answer: Any) -> dict[str, Any]:
    """`observation` and `info` of what `reset` returned. Raises InvalidAnswerError."""
    observation, info = _parts("reset(seed, row)", ("observation", "info"), answer)
    said, parts = _observation("reset", observation), _info("reset", info)
    tools = parts.get("tools")
    if said == []:
        raise InvalidAnswerError("reset() must return an observation with at least one message, it returned none")
    if not (tools is None or (isinstance(tools, list) and all(map(_is_named_function, tools)))):
        raise _wrong("reset", "info['tools']", tools)
    return {"observation": said, "info": parts}


def checked_step(answer: Any) -> dict[str, Any]:
    """The five parts of what `step` returned. Raises InvalidAnswerError."""
    names = ("observation", "reward", "terminated", "truncated", "info")
    observation, reward, *flags, info = _parts("step(text)", names, answer)
    number, *ends = (each.tolist() if hasattr(each, "tolist") else each for each in (reward, *flags))
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise _wrong("step", "reward", reward)
    for name, given, plain in zip(("terminated", "truncated"), flags, ends, strict=True):
        if not isinstance(plain, bool):
            raise _wrong("step", name, given)
    return {
        "observation": _observation("step", observation),
        "reward": float(number),
        "terminated": ends[0],
        "truncated": ends[1],
        "info": _info("step", info),
    }


def _wrong(method: str, name: str, value: Any) -> InvalidAnswerError:
    return InvalidAnswerError(f"{method}() must return {name} as {_WANTED[name]}, it returned {_shown(value)}")


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {reprlib.repr(value):.60}"  # its own repr may raise


def _parts(method: str, names: tuple[str, ...], answer: Any) -> tuple[Any, ...]:
    if isinstance(answer, tuple | list) and len(answer) == len(names):
        return tuple(answer)
    got = f"{len(answer)} values" if isinstance(answer, tuple | list) else _shown(answer)
    raise InvalidAnswerError(f"{method} must return ({', '.join(names)}), it returned {got}")


def _observation(method: str, observation: Any) -> str | list[dict[str, Any]]:
    if isinstance(observation, str):
        return encodable(_limited(f"the observation of {method}()", observation))
    is_list = isinstance(observation, Sequence) and not isinstance(observation, bytes | bytearray)
    try:
        if not is_list or not all(isinstance(each["role"], str) for each in observation):
            raise TypeError
        text = json.dumps([{**each, "content": _content(each.get("content"))} for each in observation])
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        raise _wrong(method, "observation", observation) from None
    return json.loads(_limited(f"the observation of {method}()", text))


def _content(content: Any) -> str:
    """The text of a message: a text, nothing, or OpenAI's list of parts that are texts. Raises TypeError."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list | tuple) else [content]
    if not all(part["type"] == "text" for part in parts):
        raise TypeError
    return "".join(part["text"] for part in parts)


def _is_named_function(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _info(method: str, info: Any) -> dict[str, Any]:
    """What JSON can hold of an info; the rest, such as objects for other programs, is left out. Tools never are."""
    if not isinstance(info, Mapping):
        raise _wrong(method, "info", info)
    parts: dict[str, Any] = {}
    for name, value in info.items():
        try:
            parts[str(name)] = json.loads(json.dumps(value, default=_plain))
        except (TypeError, ValueError, RecursionError):
            if name == "tools":
                raise _wrong(method, "info['tools']", value) from None
    _limited(f"the info of {method}()", json.dumps(parts))
    return parts


def _plain(value: Any) -> Any:
    """What JSON asks for where it cannot write an object. Raises TypeError for one without plain contents."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"a {type(value).__name__} cannot be sent")
    return value.tolist()


def _limited(what: str, text: str) -> str:
    if len(text) > MAX_ANSWER_CHARACTERS:
        raise InvalidAnswerError(f"{what} has {len(text):,} characters, more than {MAX_ANSWER_CHARACTERS:,}")
    return text
