"""Exchanges to segments to tokens, for data and for responses that a reward model with its own tokenizer reads.

Prompts beyond a limit are dropped, or shortened at the beginning; responses are never cut.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from proximo.data.formats.prompt_response import Exchange, Messages, assistant_turn
from proximo.data.templates.chat import Learned, end_of_turn_ids, render_conversation
from proximo.data.tokenise import Encoded, Rendered, Segment, TextEncoder, Tokens
from proximo.errors import DataError
from proximo.records import Prompt


def render(encoder: TextEncoder, exchange: Exchange, *, finished: bool = True, learned: Learned = "last") -> Rendered:
    """Segments of an exchange: text unchanged, with BOS and EOS by id; messages by the tokenizer's chat template.

    Responses that are not `finished` have no end. `learned`: the turns of the assistant that a loss learns.
    """
    if not isinstance(exchange.prompt, str):
        responses = [response for response in exchange.responses if not isinstance(response, str)]
        return render_conversation(
            encoder,
            exchange.prompt,
            responses,
            origin=exchange.origin,
            finished=finished,
            learned=learned,
            variables=exchange.template_variables,
        )
    texts = [str(response) for response in exchange.responses]
    # A text without a prompt may begin with a BOS.
    begins = encoder.start(exchange.prompt or (texts[0] if texts else ""))
    return Rendered(
        prompt=(*begins, *_segments_of(exchange.prompt, written=False)),
        responses=tuple(
            (*_segments_of(text, written=True), *(encoder.end(text) if finished else ())) for text in texts
        ),
    )


def encode_exchanges(
    encoder: TextEncoder, exchanges: Sequence[Exchange], *, learned: Learned = "last"
) -> tuple[list[Rendered], list[Encoded]]:
    """Segments and tokens of each exchange, tokenised in one call."""
    rendered = [render(encoder, exchange, learned=learned) for exchange in exchanges]
    return rendered, encoder.rendered(rendered)


def count_unread(rendered: Iterable[Rendered]) -> dict[str, int]:
    """Keys that the chat template ignored -> number of conversations."""
    return Counter(name for each in rendered for name in each.unread)


def render_for(
    encoder: TextEncoder, prompt: Prompt, response_text: str, *, finished: bool = True
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(prompt ids, response ids) under another tokenizer and template than the policy's: from messages or text.

    They are the ids on which a reward model of this tokenizer was trained. `finished`: the policy ended its answer, so
    the end of turn (or EOS) follows. Raises DataError for a prompt that has only token ids.
    """
    rendered = render(encoder, _asked_again(encoder, prompt, response_text), finished=finished)
    encoded = encoder.rendered([rendered])[0]
    return encoded.prompt.ids, encoded.responses[0].ids


def check_rendering(encoder: TextEncoder, prompts: Iterable[Prompt]) -> None:
    """Raises what `render_for` would raise for the first of these prompts that it cannot render, without tokens."""
    end_of_turn_ids(encoder)  # tries a template that may loop in a child process first
    for prompt in prompts:
        render(encoder, _asked_again(encoder, prompt, "a"))


def _asked_again(encoder: TextEncoder, prompt: Prompt, response_text: str) -> Exchange:
    if prompt.messages is not None:
        return Exchange(
            origin=f"prompt '{prompt.id}'",
            prompt=prompt.messages,
            responses=(assistant_turn(response_text),),
            template_variables=prompt.template_variables,
        )
    if prompt.text is not None:
        return Exchange(origin=f"prompt '{prompt.id}'", prompt=prompt.text, responses=(response_text,))
    raise DataError(
        f"prompt '{prompt.id}' has token ids only; the tokenizer '{encoder.name}' is not the policy's, "
        "so it needs text or messages"
    )


def _segments_of(text: str, *, written: bool) -> tuple[Segment, ...]:
    return (Segment(text=text, written=written),) if text else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """The options that all loaders have."""

    max_tokens: int | None = None
    """Limit of the prompt and its longest response together."""
    too_long: Literal["drop", "truncate"] = "drop"
    as_messages: bool = False
    """Text becomes messages, rendered with the chat template."""
    system: str | None = None
    """A system message for conversations that have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """An exchange within its limit, with its tokens."""

    exchange: Exchange
    encoded: Encoded
    is_truncated: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences: the prompt counts once for each response."""
        responses = self.encoded.responses
        return len(self.encoded.prompt) * max(1, len(responses)) + sum(map(len, responses))


def fit(
    encoder: TextEncoder,
    exchange: Exchange,
    encoded: Encoded,
    options: LoadOptions,
    learned: Learned,
) -> Fitted | None:
    """The exchange with prompt and longest response within `options.max_tokens`; None if it is dropped.

    Truncation keeps the end of the prompt, which the response answers: text loses its first tokens (after the BOS), a
    conversation its oldest turns (after the system message), whole turns at a time, so that it stays a conversation.
    An exchange that still does not fit is dropped. Text or messages are shortened with the tokens. `learned`: see
    `render_conversation`.
    """
    max_tokens = options.max_tokens
    if max_tokens is None or _num_tokens(encoded) <= max_tokens:
        return Fitted(exchange=exchange, encoded=encoded)
    if options.too_long == "drop":
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
