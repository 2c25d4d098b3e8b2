"""Renders a conversation as text by a chat template; `chat.py` finds the assistant's words in it.

The form in which a template takes tool calls is found by trying each: some want arguments as an object, some as JSON
text; some write a call only if the content is null. None of them declares it, and many silently leave out what they do
not know.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from proximo.data.templates.limits import TemplateLimitError, limited
from proximo.records import Message

DUMMY = "kvxqz"
"""Placeholder for the words of a turn, to find the text around them."""
_ASKED: Message = {"role": "user", "content": "a"}
_TOOL_NAME = "wjqyz"
_TOOL = {"type": "function", "function": {"name": _TOOL_NAME, "description": "b", "parameters": {"type": "object"}}}


class CallForm(NamedTuple):
    """The form of messages with calls for a template."""

    as_text: bool = False
    """Arguments are JSON text."""
    without_content: bool = False
    """The content of a turn with calls and no words is null, not empty."""

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages in this form, without keys that are not for a template."""
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> dict[str, Any]:
        given = {key: value for key, value in message.items() if key != "weight"}
        if "tool_calls" not in given:
            return given
        if self.as_text:
            given["tool_calls"] = [_with_text(call) for call in given["tool_calls"]]
        return given if given["content"] or not self.without_content else {**given, "content": None}


FORMS = (CallForm(), CallForm(False, True), CallForm(True, True), CallForm(True, False))
"""Forms in the order of trying; the first that a template writes completely is used."""


@lru_cache(maxsize=64)
def _call_form(source: str, tokens: str) -> CallForm | None:
    """The form in which a template writes the name and the arguments of a call; None if there is none."""
    wanted = (DUMMY, f"{DUMMY}{DUMMY[-1]}")
    for form in FORMS:
        text = _tried(source, tokens, form.messages([_ASKED, _calling(*wanted)]), open_reply=False)
        if all(word in text for word in wanted):
            return form
    return None


@lru_cache(maxsize=64)
def _writes_results(source: str, tokens: str) -> bool:
    """Whether a template writes the result of a tool."""
    form = _call_form(source, tokens)
    calls = [] if form is None else [_calling("b", "c")]
    returned = {"role": "tool", "name": "b", "tool_call_id": "a1b2c3d4e", "content": DUMMY}
    return DUMMY in _tried(source, tokens, (form or FORMS[0]).messages([_ASKED, *calls, returned]), open_reply=True)


@lru_cache(maxsize=64)
def writes_tools(source: str, tokens: str) -> bool:
    """Whether a template writes the variable `tools`, be it only with a system message."""
    asked = [dict(_ASKED)]
    tries = (asked, [{"role": "system", "content": "a"}, *asked])
    return any(_TOOL_NAME in _tried(source, tokens, messages, open_reply=True) for messages in tries)


def _tried(source: str, tokens: str, messages: list[dict[str, Any]], *, open_reply: bool) -> str:
    """The rendering of messages with a tool; "" if the template refuses them."""
    try:
        return _rendered(source, tokens, messages, {"tools": [_TOOL]}, open_reply=open_reply)
    except TemplateSyntaxError:
        raise
    except TemplateError:
        return ""


def _calling(name: str, argument: str) -> Message:
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": name, "arguments": {"b": argument}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return dict(call)
    return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}}


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
