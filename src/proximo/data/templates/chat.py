"""Conversations to segments, by the tokenizer's own chat template.

The assistant's text is found by rendering the conversation turn by turn: the beginning of a conversation should be
rendered as the beginning of the whole. A second rendering with placeholder words shows where the words of a turn are;
searching for them would fail, because an answer may be a piece of the template. Some templates rewrite earlier turns,
or open a turn with words that they later leave out. That matters only if a loss learns several turns, and is refused
only then. Markers inside templates (`{% generation %}`) are not needed. The template decides on the BOS; nothing is put
before its text.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from proximo.data.formats.prompt_response import no_template
from proximo.data.templates.conversation_text import DUMMY, check_template, conversation_text, writes_tools
from proximo.data.templates.ignored_content import unread
from proximo.data.templates.limits import RenderingError, TemplateLimitError, try_template
from proximo.data.templates.turn_ends import end_of_turn, runs_of_marks
from proximo.data.tokenise import Rendered, Segment, TextEncoder
from proximo.errors import ConfigError, ModelError
from proximo.records import Message

Learned = Literal["last", "responses", "all"]
"""The turns of the assistant that a loss learns: the last one of a response, each of a response, those of the prompt
too."""


def render_conversation(
    encoder: TextEncoder,
    prompt: Sequence[Message],
    responses: Sequence[Sequence[Message]] = (),
    *,
    origin: str,
    finished: bool = True,
    learned: Learned = "last",
    variables: Mapping[str, Any] | None = None,
) -> Rendered:
    """Segments of a prompt (up to where the assistant begins) and of responses to it (lists of messages).

    A `finished` response ends with the template's end of the assistant's turn (`end_of_turn`): special tokens, or plain
    words and then the EOS, or only the EOS. Template text after that is left out, because a policy stops before it. A
    response that the template would rewrite is kept unchanged after the words that open its turn, as a policy would
    write it. A turn with `weight` 0 is context. `variables`: variables of the template besides messages (`tools`).

    Raises DataError if the template refuses the messages or leaves out tools, their calls or their results, and
    ModelError if there is no template, it exceeds its limits, or it rewrites turns that are `learned`.
    """
    template = ChatTemplate(encoder, origin, variables or {})
    asked = template.text(prompt, open_reply=True)
    template.check_tools()
    try:
        segments = _segments(template, prompt, asked, open_reply=True)
    except _RewrittenError as rewritten:
        if learned == "all":
            raise template.refuse(rewritten.turn, learned) from None
        segments = [Segment(text=asked, written=False)]
    answered = []
    for response in responses:
        reply = _answer(template, prompt, asked, response, finished=finished, learned=learned)
        while reply and not reply[-1].written:
            reply.pop()
        if finished and not (reply and reply[-1].ends_turn and reply[-1].text.endswith(encoder.marks)):
            end = encoder.end(reply[-1].text if reply else "")
            reply += [replace(segment, is_context=_is_context(response[-1])) for segment in end]
        answered.append(tuple(reply))
    ignored = unread(template.source, chain(prompt, *responses), template.variables)
    return Rendered(prompt=tuple(segments), responses=tuple(answered), unread=ignored)


def end_of_turn_ids(encoder: TextEncoder) -> tuple[int, ...]:
    """Ids of the special tokens that the chat template puts after an assistant's text to end its turn (`end_of_turn`).

    A rollout must stop at the last of them. Empty if there is no template, it puts no special token there, or it
    refuses a question with its answer: a policy that only continues plain text needs no template, and data in messages
    is refused when it is rendered. Raises ModelError for a template beyond its limits.
    """
    if not encoder.tokenizer.chat_template:
        return ()
    template = ChatTemplate(encoder, "end of turn", {})
    template.try_out()
    ending = template.ending
    return encoder.texts([ending])[0] if ending.endswith(encoder.marks) else ()


class _Reply(NamedTuple):
    """A turn of the assistant as text, after the words that open it."""

    words: str
    gap: str
    """The template's text between the words and the end, for example a space."""
    end: str
    """The end of the turn; "" if there is none."""

    def segments(self, *, finished: bool, is_context: bool) -> list[Segment]:
        said = partial(Segment, written=True, is_context=is_context)
        if not finished:
            return [said(text=self.words)] if self.words else []
        segments = [said(text=self.words + self.gap), said(text=self.end, ends_turn=True)]
        return [segment for segment in segments if segment.text]


class _RewrittenError(Exception):
    """The template renders a turn of the assistant in another way once later turns follow."""

    def __init__(self, turn: int) -> None:
        super().__init__(turn)
        self.turn = turn


class ChatTemplate:
    """The chat template of one tokenizer, for the messages of one row or of one conversation."""

    def __init__(self, encoder: TextEncoder, origin: str, variables: Mapping[str, Any]) -> None:
        self.encoder = encoder
        self.origin = origin
        self.variables = variables
        tokenizer = encoder.tokenizer
        if not tokenizer.chat_template:
            raise ModelError(no_template(origin, encoder.name))
        try:
            self.source = tokenizer.get_chat_template(tools=variables.get("tools"))
        except ValueError as error:  # several named templates without a default
            raise ModelError(f"{origin}: the tokenizer '{encoder.name}': {error}") from error
        self.tokens = json.dumps(tokenizer.special_tokens_map)
        self.eos = str(tokenizer.eos_token)

    def try_out(self) -> None:
        """Renders a question in a child process. Raises ModelError for a template beyond the limits."""
        with self._limits_named():
            try_template(self.source, self.tokens)

    def check_tools(self) -> None:
        """Raises RenderingError if the row has tools and the template never writes any."""
        with self._limits_named():
            if "tools" not in self.variables or writes_tools(self.source, self.tokens):
                return
        raise RenderingError(
            f"{self.origin}: the chat template of '{self.encoder.name}' does not write tools, so a model would learn "
            "without having seen them: give a template that does as tokenizer.chat_template, or leave them out: "
            "`columns: {tools: ''}`"
        )

    @property
    def ending(self) -> str:
        """The end of an assistant's turn: special tokens, or plain text; "" if there is none."""
        with self._limits_named():
            return _ending(self.source, self.tokens, self.encoder.marks, self.eos)

    def text(self, messages: Sequence[Message], *, open_reply: bool, variables: Mapping[str, Any] | None = None) -> str:
        """The rendering, with the words that open the assistant's turn if `open_reply`.

        `variables`: replace those of the row.
        """
        given = self.variables if variables is None else variables
        try:
            with self._limits_named():
                return conversation_text(self.source, self.tokens, messages, open_reply=open_reply, variables=given)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"{self.origin}: {_place(self.encoder.name)}, line {error.lineno}: the chat template is not valid "
                f"Jinja ({error.message}): correct it there, or give another as tokenizer.chat_template"
            ) from error
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages) or "none"
            raise RenderingError(
                f"{self.origin}: the chat template of '{self.encoder.name}' refuses the messages (roles: {roles}): "
                f"{error}"
            ) from error

    def around(self, messages: Sequence[Message]) -> tuple[str, str] | None:
        """The text before and after the content of the last message; None if that is not in exactly one place."""
        try:
            return _around(lambda given: self.text(given, open_reply=False), messages, self.source + self.tokens)
        except RenderingError:
            return None

    def end(self, behind: str, message: Message) -> tuple[int, str]:
        """(place, text) of the end of a turn in the text after its words; the text is "" if there is none.

        After words the end comes first; after tool calls, which may contain special tokens, it comes last.
        """
        calls = "tool_calls" in message
        if (ending := self.ending) and ending in behind:
            return behind.rfind(ending) if calls else behind.find(ending), ending
        runs = runs_of_marks(behind, self.encoder.marks, self.eos)
        if not calls:
            return runs[0] if runs else (0, "")
        return runs[-1] if runs else (len(behind.rstrip()), "")

    def verbatim(self, message: Message) -> _Reply:
        """A turn with its words unchanged by the template."""
        if not isinstance(message["content"], str) or message.get("tool_calls"):
            raise ModelError(
                f"{self.origin}: the chat template of '{self.encoder.name}' does not write the answer in one piece "
                "after the words that open its turn, and its tool calls have no other form; leave the row out, or "
                "give another template as tokenizer.chat_template"
            )
        return _Reply(message["content"], "", self.ending)

    def refuse(self, turn: int, learned: Learned) -> ModelError:
        """The error for a template whose rendering does not separate the learned turns from the rest."""
        what_to_do = (
            "to learn the last turn alone, set train_on: last_response"
            if learned == "all"
            else "give responses of one turn, with the earlier ones in the prompt"
        )
        return ModelError(
            f"{self.origin}: the chat template of '{self.encoder.name}' renders message {turn + 1} in another way with "
            f"the turns around it, so the tokens that the assistant wrote there are unknown; {what_to_do}; to learn "
            "every turn, give a template that renders each turn in one way"
        )

    @contextmanager
    def _limits_named(self) -> Generator[None]:
        try:
            yield
        except TemplateLimitError as error:
            raise TemplateLimitError(
                f"{self.origin}: the chat template of '{self.encoder.name}' could not be rendered: {error}; give "
                "another as tokenizer.chat_template"
            ) from error


def check_syntax(template: str) -> None:
    """Raises ConfigError, with the line, for a `tokenizer.chat_template` that is not valid Jinja."""
    try:
        check_template(template)
    except TemplateSyntaxError as error:
        line = f"line {error.lineno}: {template.splitlines()[error.lineno - 1].strip()!r:.60}"
        raise ConfigError(f"tokenizer.chat_template is not valid Jinja: {error.message} ({line})") from error


def _place(name: str) -> str:
    """The file with the template of a tokenizer, for a message."""
    files = (Path(name) / "chat_template.jinja", Path(name) / "tokenizer_config.json")
    return next((str(file) for file in files if file.is_file()), f"the tokenizer '{name}'")


def _around(
    render: Callable[[Sequence[Message]], str], messages: Sequence[Message], words: str
) -> tuple[str, str] | None:
    """The text that `render` puts before and after the content of the last message; None if not in one place.

    `words`: text of the template itself.
    """
    dummy, words = DUMMY, words + json.dumps(messages, default=str)
    while dummy in words:
        dummy += DUMMY[-1]
    before, found, behind = render([*messages[:-1], {**messages[-1], "content": dummy}]).partition(dummy)
    return (before, behind) if found and dummy not in behind else None


@lru_cache(maxsize=64)
def _ending(source: str, tokens: str, marks: tuple[str, ...], eos: str) -> str:
    """The end of a turn of the assistant, in any position: see `end_of_turn`."""
    asked: Message = {"role": "user", "content": "a"}
    toy = [asked, {"role": "assistant", "content": DUMMY}]

    def behind(*following: Message) -> str | None:
        def render(given: Sequence[Message]) -> str:
            return conversation_text(source, tokens, [*given, *following], open_reply=False)

        try:
            place = _around(render, toy, source + tokens)
        except TemplateError:
            return None
        return place and place[1]

    last = behind()
    return "" if last is None else end_of_turn(last, behind(asked), marks, eos)


def _segments(
    template: ChatTemplate,
    messages: Sequence[Message],
    whole: str,
    *,
    open_reply: bool,
    done: tuple[int, str] = (0, ""),
    finished: bool = True,
) -> list[Segment]:
    """Segments of a conversation after `done`: (number of messages, their rendering with an open reply).

    `finished`: whether the last turn has its end. Raises _RewrittenError for a turn of the assistant that `whole`
    renders in another way than the conversation up to it.
    """
    num_done, done_text = done
    segments: list[Segment] = []
    position = len(done_text)
    for turn in range(num_done, len(messages)):
        if messages[turn]["role"] == "assistant":
            is_last, is_context = turn + 1 == len(messages) and not open_reply, _is_context(messages[turn])
            try:
                before = done_text if turn == num_done > 0 else _before(template, messages, turn)
                through = whole if is_last else template.text(messages[: turn + 1], open_reply=False)
                reply = _split_reply(template, before, through, messages[: turn + 1])
                if reply is None or position > len(before) or not whole.startswith(before + "".join(reply)):
                    raise _RewrittenError(turn)
            except _RewrittenError:
                if is_context and not is_last:
                    continue
                raise
            segments.append(Segment(text=whole[position : len(before)], written=False))
            segments += reply.segments(finished=finished or not is_last, is_context=is_context)
            position = len(before) + len("".join(reply))
    segments.append(Segment(text=whole[position:], written=False))
    return [segment for segment in segments if segment.text]


def _is_context(message: Message) -> bool:
    return message.get("weight") == 0


def _before(template: ChatTemplate, messages: Sequence[Message], turn: int) -> str:
    try:
        return template.text(messages[:turn], open_reply=True)
    except RenderingError:
        if turn:
            raise
        raise _RewrittenError(turn) from None  # it refuses a conversation without messages


def _answer(
    template: ChatTemplate,
    prompt: Sequence[Message],
    asked: str,
    response: Sequence[Message],
    *,
    finished: bool,
    learned: Learned,
) -> list[Segment]:
    messages = [*prompt, *response]
    whole = template.text(messages, open_reply=False)
    try:
        return _segments(template, messages, whole, open_reply=False, done=(len(prompt), asked), finished=finished)
    except _RewrittenError as rewritten:
        earlier = [each for each in response[:-1] if each["role"] == "assistant" and not _is_context(each)]
        if learned != "last" and earlier:
            raise template.refuse(rewritten.turn, learned) from None
    before = template.text(messages[:-1], open_reply=True)
    if not before.startswith(asked):
        raise ModelError(
            f"{template.origin}: the chat template of '{template.encoder.name}' renders the prompt in another way once "
            "the first turn of the response follows; give responses of one turn"
        )
    reply = _split_reply(template, before, whole, messages) or template.verbatim(response[-1])
    opening = before[len(asked) :]
    return [
        *([Segment(text=opening, written=False)] if opening else []),
        *reply.segments(finished=finished, is_context=_is_context(response[-1])),
    ]


def _split_reply(template: ChatTemplate, before: str, through: str, messages: Sequence[Message]) -> _Reply | None:
    """The last turn, opened by `before`; None if the template rewrites it.

    `through`: the rendering up to and including the turn.
    """
    if "tool_calls" in messages[-1] and through.startswith(before):
        position, ending = template.end(through[len(before) :], messages[-1])
        return _Reply(through[len(before) : len(before) + position], "", ending)
    place = template.around(messages)
    if place is None or not (place[0].startswith(before) and through.startswith(before)):
        return None
    opening, behind = place[0][len(before) :], place[1]
    text, content = through[len(before) :], messages[-1].get("content") or ""
    # Many templates strip the words; some move a thought inside the words to the place of their own empty one.
    spelled = (content, content.strip(), content.lstrip(), content.rstrip())
    if not any(text in (opening + words + behind, words + behind) for words in spelled):
        return None
    position, ending = template.end(behind, messages[-1])
    return _Reply(text[: len(text) - len(behind)], behind[:position], ending)
