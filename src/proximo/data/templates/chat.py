"""Conversations to segments, by the tokenizer's own chat template. Not the rendering (`renderer.py`).

What the assistant wrote is found by rendering the conversation turn by turn: the beginning of a conversation should be
rendered as the beginning of the whole. Some templates rewrite earlier turns, or open a turn in words that they do not
put there later. That matters only where a loss learns several turns, and is refused there alone. Markers inside
templates (`{% generation %}`) are not needed. The template decides on the BOS; nothing is put before its text.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from proximo.data.templates.renderer import RENDERER, RenderingError, TemplateLimitError
from proximo.data.tokenise import Rendered, Segment, TextEncoder
from proximo.errors import ConfigError, ModelError
from proximo.records import Message

PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '\\n\\nHuman: ' + message['content'] }}"
    "{% else %}{{ '\\n\\nAssistant: ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)
"""A template in plain words for tokenizers that have none; needs an EOS token, which ends each assistant's turn."""

_SAID = "kvxqz"
"""Stands for an assistant's text where only what follows it is of interest."""


def render_conversation(
    encoder: TextEncoder,
    prompt: Sequence[Message],
    responses: Sequence[Sequence[Message]] = (),
    *,
    origin: str,
    finished: bool = True,
    every_turn: bool = False,
) -> Rendered:
    """Segments of a prompt (up to where the assistant begins) and of responses to it (lists of messages).

    A response ends with what the template puts after the assistant's text to end its turn: a special token, or plain
    words and then the EOS, or the EOS alone; with none of these where it is not `finished`. Template text behind that
    is left out: a policy stops before it. A response that the template would write in another way stands as it is,
    behind the words that open its turn: so a policy would write it.

    Raises DataError where the template refuses the messages, ModelError where there is no template, it exceeds its
    limits, or it rewrites turns of the assistant and `every_turn` is to be told from the rest.
    """
    template = _Template(encoder, origin)
    asked = template.text(prompt, open_reply=True)
    try:
        segments = _segments(template, prompt, asked, open_reply=True)
    except _RewrittenError as rewritten:
        if every_turn:
            raise template.refuse(rewritten.turn) from None
        segments = [Segment(text=asked, written=False)]
    answered = []
    for response in responses:
        reply = _answer(template, prompt, asked, response, every_turn=every_turn)
        while reply and not reply[-1].written:
            reply.pop()
        if not finished and reply and reply[-1].text in (*encoder.marks, template.ending):
            reply.pop()
        elif finished and not (reply and reply[-1].text in encoder.marks):
            reply += encoder.end(reply[-1].text if reply else "")
        answered.append(tuple(reply))
    return Rendered(prompt=tuple(segments), responses=tuple(answered))


def end_of_turn_ids(encoder: TextEncoder) -> tuple[int, ...]:
    """Ids of the special token that the chat template puts after an assistant's text: a rollout must stop there.

    Empty where there is no template, it puts no special token there, or it refuses a question with its answer: a policy
    that only continues plain text needs no template, and data in messages is refused where it is rendered. Raises
    ModelError for a template beyond its limits.
    """
    if not encoder.tokenizer.chat_template:
        return ()
    ending = _Template(encoder, "end of turn").ending
    return encoder.texts([ending])[0] if ending in encoder.marks else ()


class _RewrittenError(Exception):
    """A turn of the assistant is not rendered in the whole as it is at the end of its own beginning."""

    def __init__(self, turn: int) -> None:
        super().__init__(turn)
        self.turn = turn


class _Template:
    """The chat template of one tokenizer, for the messages of one row."""

    def __init__(self, encoder: TextEncoder, origin: str) -> None:
        self.encoder = encoder
        self.origin = origin
        tokenizer = encoder.tokenizer
        if not tokenizer.chat_template:
            raise ModelError(
                f"{origin}: messages need a chat template, and the tokenizer '{encoder.name}' has none; "
                "give one (the plain template of docs/data.md will do), or use data in text form"
            )
        try:
            self.source = tokenizer.get_chat_template()
        except ValueError as error:  # several by name, and none of them the default
            raise ModelError(f"{origin}: the tokenizer '{encoder.name}': {error}") from error
        self.tokens = json.dumps(tokenizer.special_tokens_map)

    @property
    def ending(self) -> str:
        """What ends an assistant's turn: a special token, or plain text; "" where it is neither."""
        try:
            return _ending(self.source, self.tokens, self.encoder.marks)
        except TemplateLimitError as error:
            raise self._beyond(error) from error

    def text(self, messages: Sequence[Message], *, open_reply: bool) -> str:
        """The rendering, with the words that begin the assistant's turn where `open_reply` is set."""
        try:
            return _render(self.source, self.tokens, messages, open_reply=open_reply)
        except TemplateLimitError as error:
            raise self._beyond(error) from error
        except TemplateSyntaxError as error:
            raise ModelError(
                f"{self.origin}: {_place(self.encoder.name)}, line {error.lineno}: the chat template is no Jinja "
                f"({error.message}): mend it there, or give another as tokenizer.chat_template"
            ) from error
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages) or "none"
            raise RenderingError(
                f"{self.origin}: the chat template of '{self.encoder.name}' refuses the messages (roles: {roles}): "
                f"{error}"
            ) from error

    def refuse(self, turn: int) -> ModelError:
        """The error for a template under which the turns that a loss learns cannot be told from the rest."""
        name = f"{self.origin}: the chat template of '{self.encoder.name}'"
        what_to_do = "to learn the last turn alone, set train_on: last_response"
        if turn == 0:
            return ModelError(
                f"{name} cannot say what comes before message 1, with which the assistant begins, so the tokens that "
                f"it wrote there cannot be told apart; {what_to_do}, or leave that turn out"
            )
        return ModelError(
            f"{name} renders message {turn + 1} in another way once later turns follow, so the tokens that the "
            f"assistant wrote there cannot be told apart; {what_to_do}; to learn every turn, give a template that "
            "renders each of them alike"
        )

    def _beyond(self, error: TemplateLimitError) -> TemplateLimitError:
        return TemplateLimitError(
            f"{self.origin}: the chat template of '{self.encoder.name}' could not be rendered: {error}; give another "
            "as tokenizer.chat_template"
        )


def check_syntax(template: str) -> None:
    """Raises ConfigError, with the line, for a `tokenizer.chat_template` that is no Jinja, whatever it renders."""
    try:
        RENDERER.render(template, {"messages": []})
    except TemplateSyntaxError as error:
        line = f"line {error.lineno}: {template.splitlines()[error.lineno - 1].strip()!r:.60}"
        raise ConfigError(f"tokenizer.chat_template is no Jinja: {error.message} ({line})") from error
    except (TemplateError, TemplateLimitError):
        return  # with messages it may well do


def _place(name: str) -> str:
    """Where the template of a tokenizer stands."""
    files = (Path(name) / "chat_template.jinja", Path(name) / "tokenizer_config.json")
    return next((str(file) for file in files if file.is_file()), f"the tokenizer '{name}'")


def _render(source: str, tokens: str, messages: Sequence[Message], *, open_reply: bool) -> str:
    context = {"tools": None, "documents": None, **json.loads(tokens)}
    context |= {"messages": [dict(message) for message in messages], "add_generation_prompt": open_reply}
    return RENDERER.render(source, context)


@lru_cache(maxsize=64)
def _ending(source: str, tokens: str, marks: tuple[str, ...]) -> str:
    toy: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _SAID}]
    try:
        _, said, rest = _render(source, tokens, toy, open_reply=False).partition(_SAID)
    except TemplateError:
        return ""
    return _first_mark(rest, 0, marks)[1] or (rest.strip() if said else "")


def _first_mark(text: str, start: int, marks: Sequence[str]) -> tuple[int, str]:
    """(place, special token) of the first one from `start` on; (-1, "") where there is none."""
    candidates = [(position, mark) for mark in marks if (position := text.find(mark, start)) >= 0]
    return min(candidates, key=lambda item: (item[0], -len(item[1])), default=(-1, ""))


def _segments(
    template: _Template,
    messages: Sequence[Message],
    whole: str,
    *,
    open_reply: bool,
    done: tuple[int, str] = (0, ""),
) -> list[Segment]:
    """Segments of a conversation behind what is done: (number of messages, their rendering with an open reply).

    Raises _RewrittenError for a turn of the assistant that `whole` does not have as it was rendered at the end.
    """
    num_done, done_text = done
    segments: list[Segment] = []
    position = len(done_text)
    for turn in range(num_done, len(messages)):
        if messages[turn]["role"] == "assistant":
            before = done_text if turn == num_done > 0 else _before(template, messages, turn)
            is_last = turn + 1 == len(messages) and not open_reply
            through = whole if is_last else template.text(messages[: turn + 1], open_reply=False)
            reply = _split_reply(template, before, through, messages[turn]["content"])
            if reply is None or position > len(before) or not whole.startswith(before + "".join(reply)):
                raise _RewrittenError(turn)
            segments.append(Segment(text=whole[position : len(before)], written=False))
            segments += [Segment(text=part, written=True) for part in reply]
            position = len(before) + len("".join(reply))
    segments.append(Segment(text=whole[position:], written=False))
    return [segment for segment in segments if segment.text]


def _before(template: _Template, messages: Sequence[Message], turn: int) -> str:
    try:
        return template.text(messages[:turn], open_reply=True)
    except RenderingError:
        if turn:
            raise
        raise _RewrittenError(turn) from None  # it refuses a conversation of no message, which nobody asked for


def _answer(
    template: _Template, prompt: Sequence[Message], asked: str, response: Sequence[Message], *, every_turn: bool
) -> list[Segment]:
    messages = [*prompt, *response]
    whole = template.text(messages, open_reply=False)
    try:
        return _segments(template, messages, whole, open_reply=False, done=(len(prompt), asked))
    except _RewrittenError as rewritten:
        if every_turn and len(response) > 1:
            raise template.refuse(rewritten.turn) from None
    before = template.text(messages[:-1], open_reply=True)
    if not before.startswith(asked):
        raise ModelError(
            f"{template.origin}: the chat template of '{template.encoder.name}' renders the prompt in another way once "
            "the first turn of the response follows; give responses of one turn"
        )
    reply = _split_reply(template, before, whole, response[-1]["content"]) or (
        response[-1]["content"],
        template.ending,
    )
    parts = [(before[len(asked) :], False), *((part, True) for part in reply)]
    return [Segment(text=text, written=written) for text, written in parts if text]


def _split_reply(template: _Template, before: str, through: str, content: str) -> tuple[str, str] | None:
    """(what the assistant wrote, what ends its turn or "") of a turn opened by `before`; None where it is rewritten."""
    text = through.removeprefix(before)
    start = text.find(content.strip())
    if not through.startswith(before) or start < 0:
        return None
    end = start + len(content.strip())
    position, mark = _first_mark(text, end, template.encoder.marks)
    if not mark and (ending := template.ending):
        position, mark = text.find(ending, end), ending
    return (text[:end], "") if position < 0 else (text[:position], mark)
