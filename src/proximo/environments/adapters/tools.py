"""Classes in TRL's form: public methods are tools, `reset(**row)` gives a text or None, perhaps `get_reward()`."""

import inspect
import json
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

from proximo.environments.players.player import MakeEnvironment, imported, prepares
from proximo.environments.tool_calls import ToolCall, ToolStyle, parse, tool_schema
from proximo.errors import ConfigError
from proximo.user_code import error_text

NOT_TOOLS = frozenset({"reset", "get_reward", "close"})


@prepares
def tools(path: str, style: ToolStyle, kwargs: Mapping[str, Any]) -> MakeEnvironment:
    """What makes environments of the class at `path`. Raises ConfigError for a class without tools."""
    return tools_of(imported(path), style, kwargs)


def tools_of(made: Any, style: ToolStyle, kwargs: Mapping[str, Any]) -> MakeEnvironment:
    """What makes environments of a class. Raises ConfigError for one without tools."""
    members = inspect.getmembers_static(made)
    names = [name for name, each in members if inspect.isroutine(each) and name[0] != "_" and name not in NOT_TOOLS]
    if not (isinstance(made, type) and hasattr(made, "reset") and names):
        raise ConfigError(f"environment {made!r} must be a class with reset() and further public methods, its tools")
    methods = [getattr(made, name) for name in names]
    schemas = [tool_schema(MethodType(each, made) if inspect.isfunction(each) else each) for each in methods]
    return lambda: Tools(made(**kwargs), schemas, style)


class Tools:
    """Calls the tools that the policy asks for. The episode ends with the first turn that asks for none.

    The reward of a turn is by how much it changed `get_reward()`, so that they sum to the last.
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
