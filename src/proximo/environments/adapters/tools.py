"""Classes in TRL's form: public methods are tools, `reset(**row)` gives a text or None, perhaps `get_reward()`."""

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from types import MethodType
from typing import Any

from proximo.environments.players.player import MakeEnvironment, imported, prepares
from proximo.environments.tool_calls import ToolCall, ToolStyle, parse, tool_schema
from proximo.errors import ConfigError
from proximo.user_code import error_text

PAGE = "docs/environments.md"
NOT_TOOLS = frozenset({"reset", "get_reward", "close"})


@prepares
def tools(path: str, style: ToolStyle, kwargs: Mapping[str, Any], is_rewarded: bool = True) -> MakeEnvironment:
    """What makes environments of the class at `path`. Raises ConfigError for a class without tools.

    `is_rewarded`: the run has another reward. Raises ConfigError if it has none, and the class has no `get_reward`.
    """
    made = imported(path)
    if not is_rewarded:
        check_reward(made, path)
    return tools_of(made, style, kwargs)


def tools_of(made: Any, style: ToolStyle, kwargs: Mapping[str, Any]) -> MakeEnvironment:
    """What makes environments of a class. Raises ConfigError for one without tools."""
    schemas = [tool_schema(method) for method in tool_methods(made)]
    return lambda: Tools(made(**kwargs), schemas, style)


def check_reward(made: Any, name: str) -> None:
    """Raises ConfigError for a class without `get_reward`, which rewards nothing."""
    if not gives_reward(made):
        raise ConfigError(
            f"environment {name!r} has no get_reward(), and the run has no other reward, so that every episode would "
            "earn 0: give the class get_reward(), which is asked after every turn, or give the run a reward, a "
            f"function that judges the episode ({PAGE})"
        )


def gives_reward(made: Any) -> bool:
    """Whether a class of tools rewards its episodes."""
    return hasattr(_class_of(made), "get_reward")


def column_problem(made: Any, name: str, columns: Collection[str]) -> str | None:
    """Why `reset` cannot be called with a row of these columns; None if it can."""
    parameters = inspect.signature(_bound(_class_of(made), "reset")).parameters.values()
    given = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [each.name for each in parameters if each.default is each.empty and each.kind not in given]
    if (absent := next((each for each in required if each not in {"seed", *columns}), None)) is None:
        return None
    close = get_close_matches(absent, columns, n=1)
    return (
        f"reset() of environment {name!r} has a parameter {absent!r}, and the row has no such column"
        f"{f' (did you mean {close[0]!r}?)' if close else ''}; it has {', '.join(sorted(columns))}. Name one of these, "
        f"give every row the column, or give the parameter a default ({PAGE})"
    )


def _class_of(made: Any) -> Any:
    return _class_of(made.func) if isinstance(made, partial) else made


def tool_methods(made: Any) -> list[Callable[..., Any]]:
    """The methods that are tools. Raises ConfigError where there is no class, or none with tools."""
    found = _class_of(made)
    name = getattr(found, "__name__", type(found).__name__)
    if not isinstance(found, type):
        raise ConfigError(
            f"environment {name!r} is no class, and tools are the public methods of a class, which are read before one "
            "is made: give the class itself, with arguments as kwargs in a recipe, or as functools.partial(Class, ...) "
            f"in Python ({PAGE})"
        )
    members = inspect.getmembers_static(found)
    names = [each for each, of in members if inspect.isroutine(of) and each[0] != "_" and each not in NOT_TOOLS]
    if not (hasattr(found, "reset") and names):
        raise ConfigError(f"environment {name!r} must be a class with reset() and further public methods, its tools")
    return [_bound(found, each) for each in names]


def _bound(made: type, name: str) -> Callable[..., Any]:
    """A method as an object of the class has it: without `self`."""
    method = getattr(made, name)
    return MethodType(method, made) if inspect.isfunction(inspect.getattr_static(made, name)) else method


class Tools:
    """Calls the tools that the policy asks for. The episode ends with the first turn that asks for none.

    A turn's reward is the increase of `get_reward()`; an episode's is its last value.
    """

    def __init__(self, environment: Any, schemas: Sequence[Mapping[str, Any]], style: ToolStyle) -> None:
        self._environment, self._schemas, self._style = environment, schemas, style

    async def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """The prompt of the row, with the text of the class at the end of its last message, or this text alone."""
        self._reward = 0.0
        wanted = inspect.signature(self._environment.reset).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in wanted.values())
        given = {name: value for name, value in {"seed": seed, **row}.items() if takes_all or name in wanted}
        text = await _waited(self._environment.reset(**given)) or ""
        prompt = row.get("prompt") or [{"role": "user", "content": ""}]
        *before, last = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [*before, {**last, "content": (last.get("content") or "") + text}], {"tools": self._schemas}

    async def step(self, text: str) -> tuple[Any, float, bool, bool, Mapping[str, Any]]:
        """The results of the calls in a text, in their order. A tool that raises tells the policy so."""
        turn = parse(text, self._style, self._schemas)
        results = [await self._result(call) for call in turn.calls]
        before, self._reward = self._reward, await self._earned()
        info = {"tool_calls": len(turn.calls), "malformed_calls": len(turn.malformed)}
        is_over = not (turn.calls or turn.malformed)
        return turn.answers(results), self._reward - before, is_over, False, info

    async def _result(self, call: ToolCall) -> str:
        try:
            result = await _waited(getattr(self._environment, call.name)(**call.arguments))
        except MemoryError:
            raise
        except Exception as error:  # such as an argument out of range: the policy is to learn from it
            return f"Error: {error_text(error)}"
        return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)

    async def _earned(self) -> float:
        return float(await _waited(self._environment.get_reward())) if hasattr(self._environment, "get_reward") else 0.0


async def _waited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
