"""Renders a conversation as text by a chat template; `chat.py` finds the assistant's words in it."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from jinja2.exceptions import TemplateError

from proximo.data.templates.renderer import RENDERER
from proximo.data.templates.tool_forms import FORMS, CallForm, call_form, writes_results
from proximo.records import Message


def conversation_text(
    source: str,
    tokens: str,
    messages: Sequence[Message],
    *,
    open_reply: bool,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of messages by the template `source`, followed by the words that open the assistant's turn.

    `tokens`: the special tokens, as JSON. `variables`: further variables of the template, for example `tools`. Raises
    TemplateError if the template refuses the messages, or leaves out tool calls or their results.
    """
    form: CallForm | None = FORMS[0]
    if any("tool_calls" in message for message in messages):
        form = _call_form(source, tokens)
    if form is None:
        raise TemplateError("it leaves out calls of tools")
    if any(message["role"] == "tool" for message in messages) and not _writes_results(source, tokens):
        raise TemplateError("it leaves out what tools return")
    return _rendered(source, tokens, form.messages(messages), variables or {}, open_reply=open_reply)


def _rendered(
    source: str, tokens: str, messages: list[dict[str, Any]], variables: Mapping[str, Any], *, open_reply: bool
) -> str:
    context = {"tools": None, "documents": None, **json.loads(tokens), **variables}
    return RENDERER.render(source, {**context, "messages": messages, "add_generation_prompt": open_reply})


@lru_cache(maxsize=64)
def _call_form(source: str, tokens: str) -> CallForm | None:
    return call_form(partial(_rendered, source, tokens, open_reply=False))


@lru_cache(maxsize=64)
def _writes_results(source: str, tokens: str) -> bool:
    return writes_results(partial(_rendered, source, tokens, open_reply=True), _call_form(source, tokens))
