"""Rows to `LabelledResponse`, the input of KTO: a prompt, a response, and whether it is desirable."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from proximo.data.formats.prompt_response import Exchange, in_form
from proximo.data.formats.row_formats import LabelledForm, labelled_exchanges
from proximo.data.load_report import LoadReport
from proximo.data.loading import load_in_portions
from proximo.data.rendering import Fitted, TooLong, count_unread, encode_exchanges, fit
from proximo.data.rows import Row, row_id
from proximo.data.token_cache import TokenCache
from proximo.data.tokenise import TextEncoder
from proximo.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledResponse:
    """A response to a prompt, with its label. The response is never cut."""

    id: str
    """The id of the row, with `/chosen` or `/rejected` for the responses of a pair."""
    prompt_token_ids: tuple[int, ...]
    """Empty if there is neither a prompt nor a BOS."""
    response_token_ids: tuple[int, ...]
    desirable: bool
    response_mask: tuple[bool, ...] | None = None
    """True for tokens that the policy learns, False for those of the user, of tools, and of turns with weight 0. None
    if it learns all."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_token_ids) + len(self.response_token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledOptions:
    """Options for turning rows into labelled responses."""

    form: LabelledForm = "auto"
    max_tokens: int
    """Limit of prompt and response together."""
    too_long: TooLong = "drop"
    """Truncation removes the beginning of the prompt."""
    as_messages: bool = False
    """Text becomes messages, rendered with the chat template."""
    system: str | None = None


def load_labelled_responses(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    options: LabelledOptions,
    *,
    cache: TokenCache | None = None,
) -> tuple[Sequence[LabelledResponse], LoadReport]:
    """The labelled responses, in the order of the rows; a pair gives two, the chosen one first. A tie is left out.

    The report counts a pair as two rows. Large lists are kept on disk (`large_lists.py`). Raises DataError naming a
    malformed row, and if no response is left.
    """
    encoder = TextEncoder(tokenizer, cache)
    responses, report = load_in_portions(
        rows,
        lambda remarks: zip(rows, labelled_exchanges(rows, remarks, options.form), strict=True),
        lambda pair: sum(each.num_characters for each in pair[1].values()),
        lambda portion: _portion(encoder, portion, options),
    )
    if not responses:
        raise DataError(f"no response is left: {report} (max_tokens {options.max_tokens})")
    return responses, report


def _portion(
    encoder: TextEncoder, portion: Sequence[tuple[Row, dict[bool, Exchange]]], options: LabelledOptions
) -> tuple[list[LabelledResponse], LoadReport]:
    found = [
        (row_id(row) if len(of_row) == 1 else f"{row_id(row)}/{'chosen' if label else 'rejected'}", label, exchange)
        for row, of_row in portion
        for label, exchange in of_row.items()
    ]
    num_ties = sum(not of_row for _, of_row in portion)
    exchanges = in_form([each for _, _, each in found], to_messages=options.as_messages, system=options.system)
    rendered, encoded = encode_exchanges(encoder, exchanges, learned="responses")
    learnable = [
        (identity, label, exchange, item)
        for (identity, label, _), exchange, item in zip(found, exchanges, encoded, strict=True)
        if any(item.responses[0].written)
    ]
    shorten = partial(fit, encoder, max_tokens=options.max_tokens, too_long=options.too_long, learned="responses")
    fitted = [(identity, label, shorten(exchange, item)) for identity, label, exchange, item in learnable]
    kept = [_labelled(identity, label, fitting) for identity, label, fitting in fitted if fitting is not None]
    merges, checked = encoder.count_merges(rendered, encoded)
    report = LoadReport(
        num_rows=len(found) + num_ties,
        num_kept_rows=len(kept),
        num_ties=num_ties,
        num_without_targets=len(found) - len(learnable),
        num_too_long=len(fitted) - len(kept),
        num_truncated=sum(fitting is not None and fitting.is_truncated for _, _, fitting in fitted),
        num_empty_responses=sum(not exchange.responses[0] for exchange in exchanges),
        num_merged_boundaries=merges,
        unwritable=encoder.unwritable(rendered),
        unread=count_unread(rendered),
        num_checked_boundaries=checked,
        num_tokens=sum(response.num_tokens for response in kept),
    )
    return kept, report


def _labelled(identity: str, label: bool, fitted: Fitted) -> LabelledResponse:
    response = fitted.encoded.responses[0]
    return LabelledResponse(
        id=identity,
        prompt_token_ids=fitted.encoded.prompt.ids,
        response_token_ids=response.ids,
        desirable=label,
        response_mask=response.mask,
    )
