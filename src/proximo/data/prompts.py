"""Rows to `Prompt` records, the input of rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from proximo.data.formats.row_formats import prompt_exchanges, prompt_metadata
from proximo.data.formats.typed_columns import answer_cell, mean_cell
from proximo.data.load_report import LoadReport
from proximo.data.loading import load_exchanges
from proximo.data.rendering import Fitted, LoadOptions
from proximo.data.rows import Row, row_id
from proximo.data.token_cache import TokenCache
from proximo.data.tokenise import TextEncoder
from proximo.errors import DataError
from proximo.records import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions(LoadOptions):
    """Options for prompts. A truncated prompt keeps its end; a conversation loses its oldest turns."""

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
    prompts, report = load_exchanges(
        rows,
        TextEncoder(tokenizer, cache),
        options,
        lambda remarks: zip(rows, prompt_exchanges(rows, remarks, options.first_words), strict=True),
        partial(_prompt, options),
        what="prompt",
    )
    if options.fill_to_max and options.max_tokens is not None:
        report = replace(report, num_tokens=len(prompts) * options.max_tokens)
    return prompts, report


def _prompt(options: PromptOptions, row: Row, fitted: Fitted) -> Prompt:
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
