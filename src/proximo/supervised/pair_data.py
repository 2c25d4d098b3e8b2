"""Loads and tokenises the preference pairs of a stage, for reward model training and DPO."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from transformers import PreTrainedTokenizerBase

from proximo.config.data import PreferenceDataConfig
from proximo.data.load_report import LoadReport
from proximo.data.preferences import PairOptions, PreferencePair, load_preference_pairs
from proximo.data.templates.chat import Learned
from proximo.data.token_cache import TokenCache
from proximo.run.build.data import SplitRows


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPairs:
    """Training pairs and held-out pairs."""

    training: Sequence[PreferencePair]
    held_out: Sequence[PreferencePair]
    report: LoadReport
    """What was loaded and dropped among the training rows."""
    held_out_report: LoadReport | None = None
    """The same of the held-out rows; None without any."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt plus response."""
        return max(
            len(pair.prompt_token_ids) + max(len(pair.chosen_token_ids), len(pair.rejected_token_ids))
            for pair in chain(self.training, self.held_out)
        )

    @property
    def num_margins(self) -> int:
        """Number of training pairs with a margin (by how much the chosen response is better)."""
        return sum(pair.margin is not None for pair in self.training)


def load_pairs(
    data: PreferenceDataConfig,
    rows: SplitRows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    learned: Learned,
    cache: TokenCache | None = None,
) -> SplitPairs:
    """Tokenise rows into pairs. Raises DataError for a malformed row, and if no pair is left.

    `learned`: `responses` if a policy learns their tokens, `last` if a reward model reads them.
    """
    options = PairOptions(
        form=data.form,
        min_response_words=data.min_response_words,
        max_tokens=data.max_tokens,
        too_long=data.too_long,
        as_messages=data.as_messages,
        system=data.system,
        learned=learned,
    )
    training, report = load_preference_pairs(rows.training, tokenizer, options, cache=cache)
    if not rows.held_out:
        return SplitPairs(training=training, held_out=[], report=report)
    held_out, held_out_report = load_preference_pairs(rows.held_out, tokenizer, options, cache=cache)
    return SplitPairs(training=training, held_out=held_out, report=report, held_out_report=held_out_report)
