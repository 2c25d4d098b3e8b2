"""Reads tools and tool calls of a row into the form that chat templates expect: OpenAI's, with arguments as objects."""

import json
from collections.abc import Mapping
from typing import Any

from proximo.data.formats.typed_columns import describe
from proximo.data.rows import Row
from proximo.errors import DataError


def called_tools(fields: dict[str, Any], row: Row, location: str) -> list[dict[str, Any]]:
    """Removes the calls of a message from its fields and returns them; [] if there are none.

    `tool_calls` is a list of calls or one, `function_call` is one; both may be JSON text. A call has `function` with
    `name` and `arguments`, or these two directly; arguments are an object, or JSON text of one. Raises DataError.
    """
    calls: list[Any] = []
    for name in ("tool_calls", "function_call"):
        given = fields.pop(name, None)
        given = (parsed(given, row, f"{name} of {location}") if isinstance(given, str) else given) or []
        calls += given if isinstance(given, list | tuple) else [given]
    return [_call(call, row, location) for call in calls]


def tools_cell(row: Row) -> list[dict[str, Any]]:
    """The `tools` of a row as a list of functions with their JSON schemas; [] if it has none.

    The list, and each of its entries, may be JSON text. A bare function is wrapped in the object that templates expect.
    Raises DataError for anything else.
    """
    value = without_added_nulls(row, "tools")
    value = (parsed(value, row, "column 'tools'") if isinstance(value, str) else value) or []
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise DataError(f"{row.origin}: column 'tools' must be a list of functions, got {describe(value)}")
    return [_tool(tool, row, f"tool {index} of column 'tools'") for index, tool in enumerate(value, start=1)]


def parsed(text: str, row: Row, what: str) -> Any:
    """The value of JSON text, None for blank text. Raises DataError for other text."""
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{row.origin}: {what} is text, but not JSON: {text[:40]!r}") from error


def without_added_nulls(row: Row, column: str) -> Any:
    """A cell without the nulls that its table adds. Nulls inside JSON text within it stay."""
    value = row.values.get(column)
    return _without_nulls(value) if row.from_table and column not in row.from_text else value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _tool(tool: Any, row: Row, what: str) -> dict[str, Any]:
    tool = parsed(tool, row, what) if isinstance(tool, str) else tool
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{row.origin}: {what} must be a function with a name and a JSON schema of its parameters, got "
            f"{describe(tool)}"
        )
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}


def _call(call: Any, row: Row, location: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{row.origin}: a call in {location} must have the name of a tool and its arguments, got {describe(call)}"
        )
    what = f"arguments of '{function['name']}' in {location}"
    if "arguments" not in function and function.keys() - {"name", "id", "type"}:
        raise DataError(f"{row.origin}: there are no {what}; the call is {describe(function)}")
    given = function.get("arguments")
    arguments = (parsed(given, row, what) if isinstance(given, str) else given) or {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{row.origin}: {what} must be an object, got {describe(arguments)}")
    identity = {"id": call["id"]} if "id" in call else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
