"""Drops prompts that exceed their limit, or shortens them at the beginning; responses are never cut."""

from dataclasses import dataclass, replace
from typing import Literal

from proximo.data.formats.prompt_response import Exchange, Messages
from proximo.data.rendering import encode_exchanges
from proximo.data.templates.chat import Learned
from proximo.data.tokenise import Encoded, TextEncoder, Tokens

TooLong = Literal["drop", "truncate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """An exchange within its limit, with its tokens."""

    exchange: Exchange
    encoded: Encoded
    is_truncated: bool = False


def fit(
    encoder: TextEncoder,
    exchange: Exchange,
    encoded: Encoded,
    *,
    max_tokens: int | None,
    too_long: TooLong,
    learned: Learned = "last",
) -> Fitted | None:
    """The exchange with prompt and longest response within `max_tokens`; None if it is dropped.

    Truncation keeps the end of the prompt, which the response answers: text loses its first tokens (after the BOS), a
    conversation its oldest turns (after the system message), whole turns at a time, so that it stays a conversation.
    An exchange that still does not fit is dropped. Text or messages are shortened with the tokens. `learned`: see
    `render_conversation`.
    """
    if max_tokens is None or _num_tokens(encoded) <= max_tokens:
        return Fitted(exchange=exchange, encoded=encoded)
    if too_long == "drop":
        return None
    if isinstance(exchange.prompt, str):
        return _shorter_text(encoder, exchange, encoded, max_tokens - _longest_response(encoded))
    return _fewer_turns(encoder, exchange, exchange.prompt, max_tokens, learned)


def _shorter_text(encoder: TextEncoder, exchange: Exchange, encoded: Encoded, max_prompt_tokens: int) -> Fitted | None:
    prompt = encoded.prompt
    start = len(encoder.start_ids) if prompt.ids[: len(encoder.start_ids)] == encoder.start_ids else 0
    num_kept = max_prompt_tokens - start
    if num_kept < 1:
        return None
    ids = prompt.ids[-num_kept:]
    # The cut may fall within a character of several bytes; its rest decodes to the replacement character.
    text = encoder.text(ids).lstrip("\ufffd")
    kept = Tokens(prompt.ids[:start] + ids, prompt.written[:start] + prompt.written[-num_kept:])
    return Fitted(exchange=replace(exchange, prompt=text), encoded=replace(encoded, prompt=kept), is_truncated=True)


def _fewer_turns(
    encoder: TextEncoder, exchange: Exchange, messages: Messages, max_tokens: int, learned: Learned
) -> Fitted | None:
    while (shorter := _without_oldest(messages)) is not None:
        messages = shorter
        shortened = replace(exchange, prompt=messages)
        encoded = encode_exchanges(encoder, [shortened], learned=learned)[1][0]
        if _num_tokens(encoded) <= max_tokens:
            return Fitted(exchange=shortened, encoded=encoded, is_truncated=True)
    return None


def _without_oldest(messages: Messages) -> Messages | None:
    """The system message and the conversation from its second turn of the user on."""
    system = 1 if messages[0]["role"] == "system" else 0
    users = [turn for turn, message in enumerate(messages) if message["role"] == "user" and turn > system]
    return (*messages[:system], *messages[users[0] :]) if users else None


def _num_tokens(encoded: Encoded) -> int:
    return len(encoded.prompt) + _longest_response(encoded)


def _longest_response(encoded: Encoded) -> int:
    return max((len(response) for response in encoded.responses), default=0)
