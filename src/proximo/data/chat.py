"""Conversations to segments, by the tokenizer's own chat template. Not the tokenising (`tokenise.py`).

What the assistant wrote is found by rendering the conversation turn by turn: each shorter rendering must be the
beginning of the whole one, or the template is refused. Markers inside templates (`{% generation %}`) are not needed.
The template decides on the BOS; nothing is put before its text.
"""

from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from proximo.data.tokenise import Encoder, Rendered, Segment
from proximo.errors import DataError, ModelError
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


def render_conversation(
    encoder: Encoder,
    prompt: Sequence[Message],
    responses: Sequence[Sequence[Message]] = (),
    *,
    origin: str,
    append_eos: bool = True,
) -> Rendered:
    """Segments of a prompt (up to where the assistant begins) and of responses to it (lists of messages).

    A response ends with the mark that the template puts after the assistant's text, its end of turn; where the
    template has none, with the EOS (`append_eos`). Template text behind that is left out: a policy stops before it.
    Raises DataError where the template refuses the messages, ModelError where there is no template or it rewrites
    earlier turns.
    """
    template = _Template(encoder, origin)
    asked = _segments(template, prompt, open_reply=True)
    asked_text = "".join(segment.text for segment in asked)
    answered = []
    for response in responses:
        reply = _segments(template, [*prompt, *response], open_reply=False, done=(len(prompt), asked_text))
        while reply and not reply[-1].written:
            reply.pop()
        if append_eos and not _ends_with_mark(reply, encoder):
            reply += encoder.end(reply[-1].text if reply else "")
        answered.append(tuple(reply))
    return Rendered(prompt=tuple(asked), responses=tuple(answered))


def end_of_turn_ids(encoder: Encoder) -> tuple[int, ...]:
    """Ids of the mark that the chat template puts after an assistant's text: a rollout must stop there.

    Empty where there is no template, it puts no special token there, or it cannot render a conversation turn by turn:
    a policy that only continues plain text needs no template, and data in messages is refused where it is rendered.
    """
    if not encoder.tokenizer.chat_template:
        return ()
    ask: Message = {"role": "user", "content": "a"}
    reply: Message = {"role": "assistant", "content": "b"}
    try:
        rendered = render_conversation(encoder, [ask], [[reply]], origin="end of turn", append_eos=False)
    except (DataError, ModelError):
        return ()
    if not _ends_with_mark(rendered.responses[0], encoder):
        return ()
    return encoder.texts([rendered.responses[0][-1].text])[0]


class _Template:
    """The chat template of one tokenizer, for the messages of one row."""

    def __init__(self, encoder: Encoder, origin: str) -> None:
        self.encoder = encoder
        self.origin = origin
        if not encoder.tokenizer.chat_template:
            raise ModelError(
                f"{origin}: messages need a chat template, and the tokenizer '{encoder.name}' has none; "
                "give one (the plain template of docs/data.md will do), or use data in text form"
            )

    def text(self, messages: Sequence[Message], *, open_reply: bool) -> str:
        """The rendering, with the words that begin the assistant's turn where `open_reply` is set."""
        conversation: Any = [dict(message) for message in messages]
        try:
            return str(
                self.encoder.tokenizer.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=open_reply
                )
            )
        except (TemplateError, ValueError, TypeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages) or "none"
            raise DataError(
                f"{self.origin}: the chat template of '{self.encoder.name}' refuses the messages (roles: {roles}): "
                f"{error}"
            ) from error

    def refuse(self, turn: int) -> ModelError:
        """The error for a template under which a conversation is not the continuation of its beginning."""
        return ModelError(
            f"{self.origin}: the chat template of '{self.encoder.name}' is not prefix-stable: the turns before "
            f"message {turn + 1} are rendered in another way once it is there, so the tokens that the assistant wrote "
            "cannot be told apart; give a template that renders every turn alike"
        )


def _segments(
    template: _Template, messages: Sequence[Message], *, open_reply: bool, done: tuple[int, str] = (0, "")
) -> list[Segment]:
    """Segments of a conversation behind what is done: (number of messages, their rendering with an open reply)."""
    whole = template.text(messages, open_reply=open_reply)
    num_done, done_text = done
    segments: list[Segment] = []
    position = len(done_text)
    for turn in range(num_done, len(messages)):
        if messages[turn]["role"] == "assistant":
            is_first, is_last = turn == num_done > 0, turn + 1 == len(messages) and not open_reply
            before = done_text if is_first else template.text(messages[:turn], open_reply=True)
            through = whole if is_last else template.text(messages[: turn + 1], open_reply=False)
            if not (whole.startswith(through) and through.startswith(before) and position <= len(before)):
                raise template.refuse(turn)
            reply, mark = _split_reply(template, through[len(before) :], messages[turn]["content"])
            segments += [
                Segment(text=whole[position : len(before)], written=False),
                Segment(text=reply, written=True),
                Segment(text=mark, written=True),
            ]
            position = len(before) + len(reply) + len(mark)
    segments.append(Segment(text=whole[position:], written=False))
    return [segment for segment in segments if segment.text]


def _split_reply(template: _Template, text: str, content: str) -> tuple[str, str]:
    """(what the assistant wrote, the special token that ends its turn or "") from the rendering of one turn."""
    start = text.find(content.strip())
    if start < 0:
        raise ModelError(
            f"{template.origin}: the chat template of '{template.encoder.name}' changes what the assistant wrote "
            f"({content.strip()[:40]!r} is rendered as {text[:40]!r}); give a template that keeps it"
        )
    end = start + len(content.strip())
    found = [(text.find(mark, end), mark) for mark in template.encoder.marks if mark in text[end:]]
    if not found:
        return text[:end], ""
    place, mark = min(found, key=lambda item: (item[0], -len(item[1])))
    return text[:place], mark


def _ends_with_mark(reply: Sequence[Segment], encoder: Encoder) -> bool:
    return bool(reply) and reply[-1].text in encoder.marks
