"""Finds the content of a conversation that its chat template ignores, by rendering the conversation without it."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from proximo.data.templates.limits import RenderingError

if TYPE_CHECKING:  # it imports torch, which a dry run does without
    from proximo.records import Message

View = tuple[Sequence["Message"], bool]
"""Messages, and whether the assistant's turn is opened behind them."""
Render = Callable[[Sequence["Message"], bool, Mapping[str, Any]], str]
"""Renders a view with the variables of the template."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, which transformers renders under each of them."""
_READ = {"role", "content", "weight", "tool_calls"}
_READ_OF_TOOLS = {"name", "tool_call_id"}


def unread(
    render: Render, views: Sequence[View], variables: Mapping[str, Any], *, source: str, origin: str, name: str
) -> tuple[str, ...]:
    """The keys of messages, and the variables, that make no difference to any view.

    `source`: the template; a key that does not appear in it is not tried, unless it is rendered under another name.
    `name`: the tokenizer's name. Raises RenderingError for tools that make no difference: a model would learn to call
    tools that it has not seen.
    """
    keys = sorted({key for messages, _ in views for message in messages for key in _others(message)})
    options = variables.keys() - {"tools"}
    if not (keys or variables):
        return _weights(views)

    def is_unread(key: str | None, names: Set[str] = frozenset()) -> bool:
        if not any(word in source or word in _REASONING for word in (names if key is None else {key})):
            return True
        kept = {name: value for name, value in variables.items() if name not in names}
        try:
            return all(
                render(messages, is_open, variables) == render(_without(key, messages), is_open, kept)
                for messages, is_open in views
            )
        except RenderingError:
            return False

    if "tools" in variables and is_unread(None, {"tools"}):
        raise RenderingError(
            f"{origin}: the chat template of '{name}' does not write tools, so a model would learn without having seen "
            "them: give a template that does as tokenizer.chat_template, or leave them out: `columns: {tools: ''}`"
        )
    found = [f"message key '{key}'" for key in keys if is_unread(key)]
    found += ["column 'chat_template_kwargs'"] if options and is_unread(None, options) else []
    return (*found, *_weights(views))


def missing_words(source: str, conversation: Sequence[Sequence["Message"]]) -> tuple[str, ...]:
    """The keys of messages that do not appear in a template; most of the result of `unread`, without rendering."""
    messages = [message for part in conversation for message in part]
    keys = sorted({key for message in messages for key in _others(message)})
    found = [f"message key '{key}'" for key in keys if key not in source and key not in _REASONING]
    return (*found, *_weights([(messages, False)]))


def _others(message: "Message") -> set[str]:
    return message.keys() - _READ - (_READ_OF_TOOLS if message["role"] == "tool" else set())


def _without(key: str | None, messages: Sequence["Message"]) -> list["Message"]:
    return [{name: value for name, value in message.items() if name != key} for message in messages]


def _weights(views: Sequence[View]) -> tuple[str, ...]:
    """A remark on weights of turns that are never learned."""
    asked = any(
        message.get("weight") and message["role"] != "assistant" for messages, _ in views for message in messages
    )
    return ("weight of a turn that is not the assistant's",) if asked else ()
