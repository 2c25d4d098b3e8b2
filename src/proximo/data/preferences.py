"""Rows to `PreferencePair`, the input of reward-model training and of DPO."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proximo.data.formats.preference_formats import PreferenceForm
from proximo.data.formats.prompt_response import Messages
from proximo.data.formats.row_formats import preference_exchanges
from proximo.data.formats.typed_columns import number_cell
from proximo.data.load_report import LoadReport
from proximo.data.loading import load_exchanges
from proximo.data.rendering import Fitted, LoadOptions
from proximo.data.rows import Row, row_id
from proximo.data.templates.chat import Learned
from proximo.data.token_cache import TokenCache
from proximo.data.tokenise import TextEncoder

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
class PairOptions(LoadOptions):
    """Options for turning rows into preference pairs. Truncation removes the beginning of the prompt, the same for both
    responses, and never cuts these."""

    form: PreferenceForm = "auto"
    min_response_words: int = 0
    """Pairs with a response of fewer words, split at white space, are dropped."""
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
    return load_exchanges(
        rows,
        TextEncoder(tokenizer, cache),
        options,
        lambda remarks: zip(rows, preference_exchanges(rows, remarks, options.form), strict=True),
        _pair,
        what="pair",
        learned=options.learned,
        min_words=options.min_response_words,
    )


def _pair(row: Row, fitted: Fitted) -> PreferencePair:
    prompt_ids = fitted.encoded.prompt.ids
    chosen, rejected = fitted.encoded.responses
    return PreferencePair(
        id=row_id(row),
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
