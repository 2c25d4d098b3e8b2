"""Rows to `PreferencePair`, the input of reward-model training and of DPO."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from proximo.data.formats.preference_formats import PreferenceForm
from proximo.data.formats.prompt_response import Exchange, Messages, in_form
from proximo.data.formats.row_formats import preference_exchanges
from proximo.data.formats.typed_columns import number_cell
from proximo.data.load_report import LoadReport
from proximo.data.loading import Converted, load_in_portions
from proximo.data.rendering import Fitted, TooLong, count_unread, encode_exchanges, fit
from proximo.data.rows import Row, num_distinct, row_id
from proximo.data.templates.chat import Learned
from proximo.data.token_cache import TokenCache
from proximo.data.tokenise import TextEncoder
from proximo.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferencePair:
    """Two responses to one prompt, the better one first. The responses are never cut."""

    id: str
    prompt_token_ids: tuple[int, ...]
    """Empty if there is neither a prompt nor a BOS."""
    chosen_token_ids: tuple[int, ...]
    rejected_token_ids: tuple[int, ...]
    chosen_mask: tuple[bool, ...] | None = None
    """True for tokens that a policy learns, False for those of the user, of tools, and of turns with weight 0. None if
    it learns all."""
    rejected_mask: tuple[bool, ...] | None = None
    margin: float | None = None
    """By how much the chosen one is better, in units of the score; None if the data has no scores."""
    prompt: str | Messages = ""
    chosen: str | Messages = ""
    rejected: str | Messages = ""
    """The messages or texts of the tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens of both sequences: the prompt counts twice."""
        return 2 * len(self.prompt_token_ids) + len(self.chosen_token_ids) + len(self.rejected_token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairOptions:
    """Options for turning rows into preference pairs."""

    form: PreferenceForm = "auto"
    max_tokens: int | None = None
    """Limit of the prompt and the longer response together."""
    too_long: TooLong = "drop"
    """Truncation removes the beginning of the prompt, the same for both responses, and never cuts these."""
    min_response_words: int = 0
    """Pairs with a response of fewer words, split at white space, are dropped."""
    as_messages: bool = False
    """Text becomes messages, rendered with the chat template."""
    system: str | None = None
    learned: Learned = "last"
    """`responses` for a policy, which learns each turn of the assistant in a response. A reward model reads responses
    whole."""


def load_preference_pairs(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    options: PairOptions,
    *,
    cache: TokenCache | None = None,
) -> tuple[Sequence[PreferencePair], LoadReport]:
    """A pair for each row with a preference, in the order of the rows; drops and counts ties and identical pairs.

    Large lists are kept on disk (`large_lists.py`). Raises DataError naming a malformed row, and if no pair is left.
    """
    encoder, hashes = TextEncoder(tokenizer, cache), array("q")

    def convert(portion: list[tuple[Row, Exchange | None]]) -> Converted[PreferencePair]:
        pairs, report = _portion(encoder, portion, options)
        hashes.extend(hash((pair.prompt_token_ids, pair.chosen_token_ids, pair.rejected_token_ids)) for pair in pairs)
        return pairs, report

    pairs, report = load_in_portions(
        rows,
        lambda remarks: zip(rows, preference_exchanges(rows, remarks, options.form), strict=True),
        lambda pair: 0 if pair[1] is None else pair[1].num_characters,
        convert,
    )
    report = replace(report, num_duplicate_pairs=len(pairs) - num_distinct(hashes))
    if not pairs:
        raise DataError(f"no pair is left: {report} (max_tokens {options.max_tokens})")
    return pairs, report


def _portion(
    encoder: TextEncoder, portion: Sequence[tuple[Row, Exchange | None]], options: PairOptions
) -> tuple[list[PreferencePair], LoadReport]:
    comparable = [(row, row_id(row), exchange) for row, exchange in portion if exchange is not None]
    num_with_preference = len(comparable)
    comparable = [pair for pair in comparable if min(map(_num_words, pair[2].responses)) >= options.min_response_words]
    exchanges = in_form([pair for _, _, pair in comparable], to_messages=options.as_messages, system=options.system)
    rendered, encoded = encode_exchanges(encoder, exchanges, learned=options.learned)
    differing = [
        (row, identity, exchange, item)
        for (row, identity, _), exchange, item in zip(comparable, exchanges, encoded, strict=True)
        if item.responses[0].ids != item.responses[1].ids
    ]
    learnable = [
        pair for pair in differing if options.learned == "last" or all(any(each.written) for each in pair[3].responses)
    ]
    shorten = partial(fit, encoder, max_tokens=options.max_tokens, too_long=options.too_long, learned=options.learned)
    fitted = [(row, identity, shorten(exchange, item)) for row, identity, exchange, item in learnable]
    kept = [(row, identity, found) for row, identity, found in fitted if found is not None]
    pairs = [_pair(row, identity, found) for row, identity, found in kept]
    merges, checked = encoder.count_merges(rendered, encoded)
    report = LoadReport(
        num_rows=len(portion),
        num_kept_rows=len(pairs),
        num_ties=len(portion) - num_with_preference,
        num_too_short=num_with_preference - len(comparable),
        num_identical_pairs=len(comparable) - len(differing),
        num_without_targets=len(differing) - len(learnable),
        num_too_long=len(fitted) - len(kept),
        num_truncated=sum(found.is_truncated for _, _, found in kept),
        num_empty_responses=sum(not text for _, _, found in kept for text in found.exchange.responses),
        num_merged_boundaries=merges,
        unwritable=encoder.unwritable(rendered),
        unread=count_unread(rendered),
        num_checked_boundaries=checked,
        num_tokens=sum(pair.num_tokens for pair in pairs),
    )
    return pairs, report


def _num_words(response: str | Messages) -> int:
    texts = (
        [response]
        if isinstance(response, str)
        else [turn["content"] for turn in response if turn["role"] == "assistant"]
    )
    return sum(len(text.split()) for text in texts)


def _pair(row: Row, identity: str, fitted: Fitted) -> PreferencePair:
    prompt_ids = fitted.encoded.prompt.ids
    chosen, rejected = fitted.encoded.responses
    return PreferencePair(
        id=identity,
        prompt_token_ids=prompt_ids,
        chosen_token_ids=chosen.ids,
        rejected_token_ids=rejected.ids,
        chosen_mask=chosen.mask,
        rejected_mask=rejected.mask,
        margin=number_cell(row, "margin"),
        prompt=fitted.exchange.prompt,
        chosen=fitted.exchange.responses[0],
        rejected=fitted.exchange.responses[1],
    )
