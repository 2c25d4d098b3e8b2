"""Columns that add context to a prompt: a system message, earlier turns, tools, template variables."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from proximo.data.formats.messages import messages_cell, parsed, tools_cell, without_added_nulls
from proximo.data.formats.prompt_response import Exchange, Messages, assistant_turn, prepend_messages, user_turn
from proximo.data.formats.typed_columns import describe, text_cell
from proximo.data.rows import Row
from proximo.errors import DataError

MEDIA = frozenset({"image", "images", "video", "videos", "audio", "audios"})
"""Columns of media, which no prompt can contain."""
CONTEXT = frozenset({"system", "history", "tools", "chat_template_kwargs"})
"""Columns that add context."""
_OURS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "chat_template",
    "conversations",
    "continue_final_message",
    "return_assistant_tokens_mask",
)
"""Variables that `chat_template_kwargs` may not set: those of the row, and parameters of transformers' rendering."""


def in_context(row: Row, exchange: Exchange) -> Exchange:
    """The exchange with the columns `system`, `history`, `tools` and `chat_template_kwargs` of its row added.

    Raises DataError naming the row for a malformed column, and for a second system message.
    """
    given = CONTEXT.intersection(row.values).difference(row.used)
    if not given:
        return exchange
    row = replace(row, values={name: row.values[name] for name in given})
    tools = tools_cell(row)
    variables = _variables(row) | ({"tools": tools} if tools else {})
    exchange = replace(exchange, before=(*_system(row), *_history(row)), template_variables=variables)
    return exchange if isinstance(exchange.prompt, str) else prepend_messages(exchange)


def refuse_media(row: Row) -> None:
    """Raises DataError for a row with pictures, sounds or films, whose text would be learned without them."""
    for field in sorted(MEDIA.intersection(row.values).difference(row.used)):
        if row.values[field] not in (None, "", [], {}):
            raise DataError(
                f"{row.origin}: column '{field}' holds {describe(row.values[field])}, but models here read text only, "
                f"and its text would be learned without it. Leave such rows out, or the column: "
                f"`columns: {{{field}: ''}}`"
            )


def _system(row: Row) -> Messages:
    if row.values.get("system") in (None, ""):
        return ()
    return ({"role": "system", "content": text_cell(row, "system")},)


def _history(row: Row) -> Messages:
    """Alpaca's earlier turns, pairs of an instruction and its answer; or messages."""
    value = row.values.get("history")
    if isinstance(value, str):
        value, row = parsed(value, row, "column 'history'"), replace(row, from_text=("history",))
    if not value:
        return ()
    if not isinstance(value, Sequence):
        raise DataError(f"{row.origin}: column 'history' must be a list of earlier turns, got {describe(value)}")
    if all(isinstance(turn, Mapping) for turn in value):
        return messages_cell(replace(row, values={"history": value}), "history")
    turns: list[Any] = []
    for number, pair in enumerate(value, start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(
                f"{row.origin}: turn {number} of column 'history' must be a pair of an instruction and its answer, got "
                f"{describe(pair)}"
            )
        turns += [*user_turn(pair[0]), *assistant_turn(pair[1])]
    return tuple(turns)


def _variables(row: Row) -> dict[str, Any]:
    value = without_added_nulls(row, "chat_template_kwargs")
    value = parsed(value, row, "column 'chat_template_kwargs'") if isinstance(value, str) else value
    if not value:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{row.origin}: column 'chat_template_kwargs' must be an object, got {describe(value)}")
    taken = [name for name in _OURS if name in value]
    if taken:
        raise DataError(
            f"{row.origin}: column 'chat_template_kwargs' must not set {', '.join(taken)}, which is set for every row"
        )
    return dict(value)
