"""A prompt and the responses to it, as text or as messages, before tokenisation."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from proximo.data.formats import transcripts
from proximo.errors import ConfigError, DataError

if TYPE_CHECKING:  # it imports torch, which the reading of rows does not need
    from proximo.records import Message

Messages = tuple["Message", ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A prompt with no response (PPO), one (fine-tuning) or two (chosen, rejected); all text, or all messages."""

    origin: str
    prompt: str | Messages
    """Text that the responses continue, or the messages before them; "" if a text has no prompt."""
    responses: tuple[str | Messages, ...] = ()
    """Each is text, or the messages from an assistant's turn to an assistant's turn."""
    is_transcript: bool = False
    """True if the text holds turns of `Human:` and `Assistant:`."""
    before: Messages = ()
    """Messages before a prompt of text: a system message, earlier turns."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template besides the messages: `tools`, and those in `chat_template_kwargs`."""

    @property
    def num_characters(self) -> int:
        """Characters of the prompt and all responses; for messages, of contents that are text."""
        return sum(
            len(part) if isinstance(part, str) else sum(len(str(turn.get("content") or "")) for turn in part)
            for part in (self.prompt, *self.responses, self.before)
        )


def opening(exchange: Exchange, num_words: int) -> Exchange:
    """The exchange with only the first words of its prompt. Raises ConfigError for messages."""
    if not isinstance(exchange.prompt, str):
        raise ConfigError(f"{exchange.origin}: first_words is for text prompts, but the prompt is a list of messages")
    words = re.match(rf"\s*(?:\S+\s+){{0,{num_words - 1}}}\S+", exchange.prompt)
    return replace(exchange, prompt=words[0] if words else exchange.prompt)


def refuse_weights(exchange: Exchange) -> None:
    """Raises DataError for a message with weight 0, which contradicts learning everything."""
    turns = [*exchange.prompt, *exchange.responses[0]] if not isinstance(exchange.prompt, str) else []
    if any(turn.get("weight") == 0 for turn in turns if not isinstance(turn, str)):
        raise DataError(
            f"{exchange.origin}: a message has weight 0, so it is not to be learned, but data.train_on is everything: "
            "set it to responses, or take the weight out"
        )


def no_template(origin: str, tokenizer: str) -> str:
    """The error message for messages with a tokenizer without a chat template. `tokenizer`: its name."""
    return (
        f"{origin}: messages need a chat template, and the tokenizer '{tokenizer}' has none; give one as "
        "tokenizer.chat_template (the plain template of docs/data.md will do), or use data in text form"
    )


def assistant_turn(text: str) -> Messages:
    """One turn of the assistant."""
    return ({"role": "assistant", "content": text},)


def user_turn(text: str) -> Messages:
    """One turn of the user."""
    return ({"role": "user", "content": text},)


def as_messages(exchange: Exchange, *, system: str | None = None) -> Exchange:
    """The exchange as a conversation: text becomes turns of the user and the assistant, transcripts are split.

    `system` is put in front unless the conversation already has a system message.
    """
    prompt, responses, origin = exchange.prompt, exchange.responses, exchange.origin
    if isinstance(prompt, str):
        texts = [str(response) for response in responses]
        if exchange.is_transcript:
            prompt = transcripts.prompt_messages(prompt, origin)
            responses = tuple(transcripts.reply_messages(text, origin) for text in texts)
        else:
            prompt = user_turn(prompt)
            responses = tuple(assistant_turn(text) for text in texts)
    exchange = prepend_messages(replace(exchange, prompt=prompt, responses=responses, is_transcript=False))
    if system is None or isinstance(exchange.prompt, str) or _has_system(exchange.prompt):
        return exchange
    return replace(exchange, prompt=({"role": "system", "content": system}, *exchange.prompt))


def prepend_messages(exchange: Exchange) -> Exchange:
    """The conversation with `before` as its first messages; a system message stays in front.

    Raises DataError for two different system messages.
    """
    before, prompt = exchange.before, exchange.prompt
    if isinstance(prompt, str) or not before:
        return exchange
    if _has_system(prompt):
        if _has_system(before) and before[0]["content"] != prompt[0]["content"]:
            raise DataError(
                f"{exchange.origin}: column 'system' and the first message are two system messages, and they differ: "
                "leave one out, the column with `columns: {system: ''}`"
            )
        before, prompt = (*prompt[:1], *before[_has_system(before) :]), prompt[1:]
    return replace(exchange, prompt=(*before, *prompt), before=())


def _has_system(messages: Sequence["Message"]) -> bool:
    return bool(messages) and messages[0]["role"] == "system"


def in_form(exchanges: Sequence[Exchange], *, to_messages: bool, system: str | None) -> list[Exchange]:
    """Exchanges with text kept as it is or made into messages, and a system message in front.

    Raises ConfigError for a system message that text prompts would lose, and DataError naming the row for other
    context that they would lose.
    """
    if system is not None and not to_messages and any(isinstance(exchange.prompt, str) for exchange in exchanges):
        raise ConfigError("a system message is given, but the prompts are text; set as_messages to make them messages")
    for exchange in exchanges:
        if not to_messages and (exchange.before or exchange.template_variables):
            _check_template_is_used(exchange)
    return [
        as_messages(exchange, system=system) if to_messages or not isinstance(exchange.prompt, str) else exchange
        for exchange in exchanges
    ]


def _check_template_is_used(exchange: Exchange) -> None:
    if not isinstance(exchange.prompt, str):
        return
    system, history = _has_system(exchange.before), len(exchange.before) > _has_system(exchange.before)
    variables = exchange.template_variables
    columns = {
        "system": system,
        "history": history,
        "tools": "tools" in variables,
        "chat_template_kwargs": bool(variables.keys() - {"tools"}),
    }
    name = next(name for name, is_given in columns.items() if is_given)
    raise DataError(
        f"{exchange.origin}: column '{name}' is for a chat template, but the prompt is text, which has none: set "
        f"data.as_messages, or leave the column out: `columns: {{{name}: ''}}`"
    )
