"""Rows to `Prompt` records, the input of rollouts."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from proximo.data.formats.prompt_response import Exchange, in_form
from proximo.data.formats.row_formats import prompt_exchanges, prompt_metadata
from proximo.data.formats.typed_columns import answer_cell, mean_cell
from proximo.data.load_report import LoadReport
from proximo.data.loading import Converted, load_in_portions
from proximo.data.rendering import Fitted, TooLong, count_unread, encode_exchanges, fit
from proximo.data.rows import Row, num_distinct, row_id
from proximo.data.token_cache import TokenCache
from proximo.data.tokenise import TextEncoder
from proximo.errors import DataError
from proximo.records import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """Options for turning rows into prompts."""

    max_tokens: int | None = None
    too_long: TooLong = "drop"
    """A truncated prompt keeps its end; a conversation loses its oldest turns."""
    as_messages: bool = False
    """Text prompts become a message of the user, rendered with the chat template."""
    system: str | None = None
    """A system message for conversations that have none."""
    first_words: int | None = None
    """Keep only the opening of text prompts: for continuing texts."""
    fill_to_max: bool = False
    """Lengthen every prompt to max_tokens by repeating its last token, to test the longest possible prompts."""


def load_prompts(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    options: PromptOptions,
    *,
    cache: TokenCache | None = None,
) -> tuple[Sequence[Prompt], LoadReport]:
    """A prompt for each row that fits, in the order of the rows.

    `answer` becomes the reference answer, the mean of `base_scores` the base score, all other columns the metadata.
    Large lists are kept on disk (`large_lists.py`). Raises DataError naming a malformed row or a prompt without any
    token, and if no prompt is left.
    """
    encoder, hashes = TextEncoder(tokenizer, cache), array("q")

    def convert(portion: list[tuple[Row, Exchange]]) -> Converted[Prompt]:
        prompts, report = _portion(encoder, portion, options)
        hashes.extend(hash(prompt.token_ids) for prompt in prompts)
        return prompts, report

    prompts, report = load_in_portions(
        rows,
        lambda remarks: zip(rows, prompt_exchanges(rows, remarks, options.first_words), strict=True),
        lambda pair: pair[1].num_characters,
        convert,
    )
    report = replace(report, num_duplicate_prompts=len(prompts) - num_distinct(hashes))
    if not prompts:
        limit = "" if options.max_tokens is None else f" (at most {options.max_tokens} tokens are allowed)"
        raise DataError(f"no prompt is left: {report}{limit}")
    return prompts, report


def _portion(
    encoder: TextEncoder, portion: Sequence[tuple[Row, Exchange]], options: PromptOptions
) -> tuple[list[Prompt], LoadReport]:
    exchanges = in_form([exchange for _, exchange in portion], to_messages=options.as_messages, system=options.system)
    rendered, encoded = encode_exchanges(encoder, exchanges)
    fitted = [
        fit(encoder, exchange, tokens, max_tokens=options.max_tokens, too_long=options.too_long)
        for exchange, tokens in zip(exchanges, encoded, strict=True)
    ]
    kept = [
        (_prompt(row, fitted_prompt, options), fitted_prompt.is_truncated)
        for (row, _), fitted_prompt in zip(portion, fitted, strict=True)
        if fitted_prompt is not None
    ]
    prompts = [prompt for prompt, _ in kept]
    report = LoadReport(
        num_rows=len(portion),
        num_kept_rows=len(prompts),
        num_too_long=len(portion) - len(prompts),
        num_truncated=sum(is_truncated for _, is_truncated in kept),
        unwritable=encoder.unwritable(rendered),
        unread=count_unread(rendered),
        num_tokens=sum(len(prompt.token_ids) for prompt in prompts),
    )
    return prompts, report


def _prompt(row: Row, fitted: Fitted, options: PromptOptions) -> Prompt:
    prompt, ids = fitted.exchange.prompt, fitted.encoded.prompt.ids
    if not ids:
        raise DataError(
            f"{row.origin}: the prompt is empty, and the tokenizer puts no BOS before it, so there is no token to "
            "start from; leave the row out, or let the tokenizer add a BOS"
        )
    missing = options.max_tokens - len(ids) if options.fill_to_max and options.max_tokens is not None else 0
    return Prompt(
        id=row_id(row),
        token_ids=(*ids[-1:] * missing, *ids),
        text=prompt if isinstance(prompt, str) else None,
        messages=None if isinstance(prompt, str) else tuple(map(_without_weight, prompt)),
        template_variables=fitted.exchange.template_variables,
        answer=answer_cell(row, "answer"),
        base_score=mean_cell(row, "base_scores"),
        metadata=prompt_metadata(row),
    )


def _without_weight(message: Message) -> Message:
    """The message without its weight, because a prompt is not learned."""
    return {key: value for key, value in message.items() if key != "weight"}
