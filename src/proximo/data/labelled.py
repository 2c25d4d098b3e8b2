"""Rows to `LabelledResponse`, the input of KTO: a prompt, a response, and whether it is desirable."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proximo.data.formats.prompt_response import Exchange
from proximo.data.formats.row_formats import LabelledForm, labelled_exchanges
from proximo.data.load_report import LoadReport, Remark
from proximo.data.loading import load_exchanges
from proximo.data.rendering import Fitted, LoadOptions
from proximo.data.rows import Row, row_id
from proximo.data.token_cache import TokenCache
from proximo.data.tokenise import TextEncoder

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
class LabelledOptions(LoadOptions):
    """Options for turning rows into labelled responses. Truncation removes the beginning of the prompt."""

    form: LabelledForm = "auto"


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

    def read(remarks: Counter[Remark]) -> Iterator[tuple[tuple[str, bool], Exchange | None]]:
        for row, of_row in zip(rows, labelled_exchanges(rows, remarks, options.form), strict=True):
            for label, exchange in of_row.items():
                end = "" if len(of_row) == 1 else "/chosen" if label else "/rejected"
                yield (f"{row_id(row)}{end}", label), exchange
            if not of_row:
                yield (row_id(row), False), None

    return load_exchanges(
        rows, TextEncoder(tokenizer, cache), options, read, _labelled, what="response", learned="responses"
    )


def _labelled(key: tuple[str, bool], fitted: Fitted) -> LabelledResponse:
    (identity, label), response = key, fitted.encoded.responses[0]
    return LabelledResponse(
        id=identity,
        prompt_token_ids=fitted.encoded.prompt.ids,
        response_token_ids=response.ids,
        desirable=label,
        response_mask=response.mask,
    )
