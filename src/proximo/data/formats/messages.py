"""Reads cells that hold a conversation (messages, or JSON text of them) into one form for all dialects.

Tools and their calls get the form that chat templates expect: OpenAI's, with arguments as objects.
"""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from proximo.data.formats.typed_columns import cell, describe, encodable
from proximo.data.rows import Row
from proximo.errors import DataError

if TYPE_CHECKING:  # it imports torch, which the reading of rows does not need
    from proximo.records import Message


ROLES = ("system", "user", "assistant", "tool")
"""Known roles of messages."""
ASKING = ("prompt", "messages", "conversations")
"""Columns that may hold the prompt; the first one in the row counts."""
ANSWERS = ("response", "completion", "output")
"""Columns that may hold the response: Proximo's, TRL's and Alpaca's; the first one in the row counts."""
_OTHER_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function": "tool"}
"""Names of the roles in ShareGPT and in OpenAI's older function calls."""
_CALLING = "function_call"
"""ShareGPT's role for an assistant's turn whose text is a tool call, or a list of calls."""
_WEIGHTS = ("weight", "train", "loss_mask")
"""Keys for whether a turn is learned: OpenAI's, axolotl's and verl's."""
_OPENING = re.compile(r"\s*[\[{]")
_LITERAL = re.compile(r"\[\s*\{\s*'(role|from|content|value)'\s*:.*\}\s*\]", re.DOTALL)
"""The beginning of a list of messages in Python's notation, as pandas writes it to a table."""


def messages_cell(row: Row, field: str) -> "tuple[Message, ...]":
    """A list of messages, or one message: `role` and `content`, or the ShareGPT form with `from` and `value`.

    A key without a value is left out, because tables give every message the keys of all. `tool_calls` has OpenAI's
    form, with arguments as objects. `weight` is 0 or 1, if the message has one. Raises DataError.
    """
    cell(row, field)
    value = without_added_nulls(row, field)
    turns = [value] if isinstance(value, Mapping) else value
    if not isinstance(turns, list | tuple) or not turns:
        wanted = "text or a list of messages" if field == "prompt" else "a list of messages"
        raise DataError(f"{row.origin}: column '{field}' must be {wanted}, got {describe(value)}")
    return tuple(_message(turn, row, f"'{field}', message {index}") for index, turn in enumerate(turns, start=1))


def written_messages(row: Row, field: str) -> Any:
    """The messages of a cell whose whole text is JSON of a list of messages, or of one; None for other text.

    Raises DataError for a list of messages in Python's notation, which is not JSON.
    """
    text = row.values[field]
    if not isinstance(text, str) or not _OPENING.match(text):
        return None
    if _LITERAL.fullmatch(text.strip()):
        raise DataError(
            f"{row.origin}: column '{field}' holds messages in Python's notation, {text[:40]!r}..., which is not "
            "JSON: write them with json.dumps"
        )
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    turns = [value] if isinstance(value, dict) else value
    return value if turns and all(map(_is_message, turns)) else None


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    role = value.get("role", value.get("from"))
    known = isinstance(role, str) and _OTHER_ROLES.get(role, role) in (*ROLES, _CALLING)
    return known and bool({"content", "value", "tool_calls", "function_call"} & value.keys())


def _message(turn: Any, row: Row, location: str) -> "Message":
    if not isinstance(turn, Mapping):
        raise DataError(f"{row.origin}: {location} must be an object with role and content, got {describe(turn)}")
    fields = {key: value for key, value in turn.items() if value is not None}
    if "from" in fields and "role" not in fields:
        fields = {"role": fields.pop("from"), "content": fields.pop("value", None)} | fields
    role = fields.get("role")
    if role == _CALLING:
        fields = {"role": "assistant", "tool_calls": fields.pop("content", None)} | fields | {"role": "assistant"}
    elif isinstance(role, str):
        fields["role"] = _OTHER_ROLES.get(role, role)
    if fields.get("role") not in ROLES:
        raise DataError(
            f"{row.origin}: {location} must have a role of {', '.join(ROLES)}, got {describe(fields.get('role'))}"
        )
    calls = called_tools(fields, row, location)
    if calls and fields["role"] != "assistant":
        raise DataError(f"{row.origin}: {location} calls a tool, but is a turn of {fields['role']}, not the assistant")
    weight = _weight(fields, row, location)
    content = "" if calls and fields.get("content") is None else _content(fields.get("content"), row, location)
    return fields | {"content": content} | ({"tool_calls": calls} if calls else {}) | weight


def _weight(fields: dict[str, Any], row: Row, location: str) -> dict[str, int]:
    """Removes the weight from the fields and returns {"weight": 0 or 1}, or {}."""
    given = {name: fields.pop(name) for name in _WEIGHTS if name in fields}
    known = all(isinstance(value, bool | int | float) and value in (0, 1) for value in given.values())
    if not known or len({bool(value) for value in given.values()}) > 1:
        raise DataError(
            f"{row.origin}: {' and '.join(given)} of {location} must be 0 (not learned) or 1 (learned), and agree, got "
            f"{', '.join(map(describe, given.values()))}"
        )
    return {"weight": int(all(given.values()))} if given else {}


def _content(value: Any, row: Row, location: str) -> str:
    if isinstance(value, list):
        value = "".join(_part(part, row, location) for part in value)
    if not isinstance(value, str):
        raise DataError(f"{row.origin}: the content of {location} must be text, got {describe(value)}")
    return encodable(value, row, location)


def _part(part: Any, row: Row, location: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    got = f"a part of type {part['type']!r:.40}" if isinstance(part, Mapping) and "type" in part else describe(part)
    raise DataError(
        f"{row.origin}: the content of {location} must be text, got {got}; models here read text only, so leave such "
        "rows out"
    )


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
    _function(tool, row, f"{what} must be a function with a name and a JSON schema of its parameters")
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}


def _function(value: Any, row: Row, wanted: str) -> Mapping[str, Any]:
    """The part of a tool or a call that has the name. Raises DataError if there is none."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{row.origin}: {wanted}, got {describe(value)}")
    return function


def _call(call: Any, row: Row, location: str) -> dict[str, Any]:
    function = _function(call, row, f"a call in {location} must have the name of a tool and its arguments")
    what = f"arguments of '{function['name']}' in {location}"
    if "arguments" not in function and function.keys() - {"name", "id", "type"}:
        raise DataError(f"{row.origin}: there are no {what}; the call is {describe(function)}")
    given = function.get("arguments")
    arguments = (parsed(given, row, what) if isinstance(given, str) else given) or {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{row.origin}: {what} must be an object, got {describe(arguments)}")
    identity = {"id": call["id"]} if "id" in call else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
