"""Rows to `PreferencePair`, the input of reward-model training. Not the loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proximo.data.formats.preference_formats import PreferenceForm
from proximo.data.formats.prompt_response import Messages, in_form
from proximo.data.formats.row_formats import preference_exchanges
from proximo.data.formats.typed_columns import number_cell
from proximo.data.load_report import LoadReport
from proximo.data.rendering import encode_exchanges
from proximo.data.rows import Row, row_ids
from proximo.data.token_cache import TokenCache
from proximo.data.tokenise import TextEncoder
from proximo.data.truncation import Fitted, TooLong, fit
from proximo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferencePair:
    """Two responses to one prompt, the better one first. The responses are never cut."""

    id: str
    prompt_token_ids: tuple[int, ...]
    """Empty where there is neither a prompt nor a BOS."""
    chosen_token_ids: tuple[int, ...]
    rejected_token_ids: tuple[int, ...]
    margin: float | None = None
    """By how much the chosen one is better, in units of the score; None where the data does not say."""
    prompt: str | Messages = ""
    chosen: str | Messages = ""
    rejected: str | Messages = ""
    """The messages or texts that the tokens were made from."""

    @property
    def num_tokens(self) -> int:
        """Tokens of both sequences: the prompt counts twice."""
        return 2 * len(self.prompt_token_ids) + len(self.chosen_token_ids) + len(self.rejected_token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairOptions:
    """Options for turning rows into preference pairs."""

    form: PreferenceForm = "auto"
    max_tokens: int | None = None
    """Of the prompt and the longer response together."""
    too_long: TooLong = "drop"
    """Truncation takes the beginning of the prompt, the same for both responses, and never touches these."""
    min_response_words: int = 0
    """Pairs of which one response has fewer words, by white space, are dropped."""
    as_messages: bool = False
    """Text becomes messages, rendered with the chat template."""
    system: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for a limit below 2."""
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ConfigError(f"max_tokens of a pair must be at least 2, got {self.max_tokens}")


def load_preference_pairs(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    options: PairOptions,
    *,
    cache: TokenCache | None = None,
) -> tuple[list[PreferencePair], LoadReport]:
    """A pair for each row with a preference, in the order of the rows; ties and identical pairs are left out, counted.

    Raises DataError naming the row for what is malformed, and where no pair is left.
    """
    encoder = TextEncoder(tokenizer, cache)
    comparable = [
        (row, identity, exchange)
        for row, identity, exchange in zip(rows, row_ids(rows), preference_exchanges(rows, options.form), strict=True)
        if exchange is not None
    ]
    num_with_preference = len(comparable)
    comparable = [pair for pair in comparable if min(map(_num_words, pair[2].responses)) >= options.min_response_words]
    exchanges = in_form([pair for _, _, pair in comparable], to_messages=options.as_messages, system=options.system)
    rendered, encoded = encode_exchanges(encoder, exchanges)
    differing = [
        (row, identity, fit(encoder, exchange, item, max_tokens=options.max_tokens, too_long=options.too_long))
        for (row, identity, _), exchange, item in zip(comparable, exchanges, encoded, strict=True)
        if item.responses[0].ids != item.responses[1].ids
    ]
    kept = [(row, identity, fitted) for row, identity, fitted in differing if fitted is not None]
    pairs = [_pair(row, identity, fitted) for row, identity, fitted in kept]
    merges, checked = encoder.count_merges(rendered, encoded)
    report = LoadReport(
        num_rows=len(rows),
        num_kept_rows=len(pairs),
        num_ties=len(rows) - num_with_preference,
        num_too_short=num_with_preference - len(comparable),
        num_identical_pairs=len(comparable) - len(differing),
        num_duplicate_pairs=len(pairs)
        - len({(pair.prompt_token_ids, pair.chosen_token_ids, pair.rejected_token_ids) for pair in pairs}),
        num_too_long=len(differing) - len(kept),
        num_truncated=sum(fitted.is_truncated for _, _, fitted in kept),
        num_empty_responses=sum(not text for _, _, fitted in kept for text in fitted.exchange.responses),
        num_merged_boundaries=merges,
        unwritable=encoder.unwritable(rendered),
        num_checked_boundaries=checked,
        num_tokens=sum(pair.num_tokens for pair in pairs),
    )
    if not pairs:
        raise DataError(f"no pair is left: {report} (max_tokens {options.max_tokens})")
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
        margin=number_cell(row, "margin"),
        prompt=fitted.exchange.prompt,
        chosen=fitted.exchange.responses[0],
        rejected=fitted.exchange.responses[1],
    )
