"""Exchanges to segments to tokens, for data and for responses that a reward model with its own tokenizer reads."""

from collections import Counter
from collections.abc import Iterable, Sequence

from proximo.data.formats.prompt_response import Exchange, assistant_turn
from proximo.data.templates.chat import Learned, end_of_turn_ids, render_conversation
from proximo.data.tokenise import Encoded, Rendered, Segment, TextEncoder
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
