"""A prompt and the responses to it, as text or as messages: what a row means before it is tokenised."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from proximo.data.formats import transcripts
from proximo.errors import ConfigError

if TYPE_CHECKING:  # it imports torch, which the reading of rows does not need
    from proximo.records import Message

Messages = tuple["Message", ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A prompt with no response (PPO), one (fine-tuning) or two (chosen, rejected); all text, or all messages."""

    origin: str
    prompt: str | Messages
    """Text that the responses continue, or the messages before them; "" where a text has no prompt."""
    responses: tuple[str | Messages, ...] = ()
    """Each is text, or the messages from an assistant's turn to an assistant's turn."""
    is_transcript: bool = False
    """True where the text holds turns of `Human:` and `Assistant:`."""

    @property
    def num_characters(self) -> int:
        """Of the prompt and all responses; in messages those of their contents that are text."""
        return sum(
            len(part) if isinstance(part, str) else sum(len(str(turn.get("content") or "")) for turn in part)
            for part in (self.prompt, *self.responses)
        )


def said(text: str) -> Messages:
    """One turn of the assistant."""
    return ({"role": "assistant", "content": text},)


def asked(text: str) -> Messages:
    """One turn of the user."""
    return ({"role": "user", "content": text},)


def as_messages(exchange: Exchange, *, system: str | None = None) -> Exchange:
    """The exchange as a conversation: text becomes turns of the user and the assistant, transcripts are taken apart.

    `system` is put in front unless the conversation has a system message of its own.
    """
    prompt, responses, origin = exchange.prompt, exchange.responses, exchange.origin
    if isinstance(prompt, str):
        texts = [str(response) for response in responses]
        if exchange.is_transcript:
            prompt = transcripts.prompt_messages(prompt, origin)
            responses = tuple(transcripts.reply_messages(text, origin) for text in texts)
        else:
            prompt = asked(prompt)
            responses = tuple(said(text) for text in texts)
    if system is not None and not any(message["role"] == "system" for message in prompt[:1]):
        prompt = ({"role": "system", "content": system}, *prompt)
    return replace(exchange, prompt=prompt, responses=responses, is_transcript=False)


def in_form(exchanges: Sequence[Exchange], *, to_messages: bool, system: str | None) -> list[Exchange]:
    """Exchanges as the user wants them: text kept as it is or made into messages, a system message put in front.

    Raises ConfigError for a system message that text prompts would lose.
    """
    if system is not None and not to_messages and any(isinstance(exchange.prompt, str) for exchange in exchanges):
        raise ConfigError("a system message is given, but the prompts are text; set as_messages to make them messages")
    return [
        as_messages(exchange, system=system) if to_messages or not isinstance(exchange.prompt, str) else exchange
        for exchange in exchanges
    ]
