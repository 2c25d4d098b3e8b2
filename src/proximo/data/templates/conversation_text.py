"""Renders a conversation as text by a chat template; `chat.py` finds the assistant's words in it."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from proximo.data.templates.limits import TemplateLimitError, limited
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
    from transformers.utils.chat_template_utils import render_jinja_template  # takes a second

    given: dict[str, Any] = {**json.loads(tokens), **variables, "add_generation_prompt": open_reply}
    try:
        with limited():
            (text,), _ = render_jinja_template(conversations=[messages], chat_template=source, **given)
    except (TemplateLimitError, TemplateSyntaxError):
        raise
    except Exception as error:  # any error of a template is its answer
        raise TemplateError(str(error) or type(error).__name__) from error
    return text


def check_template(source: str) -> None:
    """Raises TemplateSyntaxError for a text that is not a template. Renders nothing."""
    from transformers.utils.chat_template_utils import render_jinja_template

    render_jinja_template(conversations=[], chat_template=source)


@lru_cache(maxsize=64)
def _call_form(source: str, tokens: str) -> CallForm | None:
    return call_form(partial(_rendered, source, tokens, open_reply=False))


@lru_cache(maxsize=64)
def _writes_results(source: str, tokens: str) -> bool:
    return writes_results(partial(_rendered, source, tokens, open_reply=True), _call_form(source, tokens))
