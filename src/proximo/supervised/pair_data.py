"""The preference pairs of a stage, tokenised, as reward training and DPO read them. Not what either learns."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from proximo.config.data import PreferenceDataConfig
from proximo.data.load_report import LoadReport
from proximo.data.preferences import PairOptions, PreferencePair, load_preference_pairs
from proximo.data.token_cache import TokenCache
from proximo.run.build.data import SplitRows


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPairs:
    """Pairs to train on and pairs to evaluate on."""

    training: list[PreferencePair]
    held_out: list[PreferencePair]
    report: LoadReport
    """Of the training pairs."""

    @property
    def all(self) -> list[PreferencePair]:
        """Both."""
        return [*self.training, *self.held_out]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with an answer."""
        return max(
            len(pair.prompt_token_ids) + max(len(pair.chosen_token_ids), len(pair.rejected_token_ids))
            for pair in self.all
        )

    @property
    def num_margins(self) -> int:
        """Training pairs that say by how much the chosen answer is better."""
        return sum(pair.margin is not None for pair in self.training)


def load_pairs(
    data: PreferenceDataConfig, rows: SplitRows, tokenizer: PreTrainedTokenizerBase, *, cache: TokenCache | None = None
) -> SplitPairs:
    """Rows as the section wants them. Raises DataError for a malformed row, and where no pair is left."""
    how = PairOptions(
        form=data.form,
        min_response_words=data.min_response_words,
        max_tokens=data.max_tokens,
        too_long=data.too_long,
        as_messages=data.as_messages,
        system=data.system,
    )
    training, report = load_preference_pairs(rows.training, tokenizer, how, cache=cache)
    held_out = load_preference_pairs(rows.held_out, tokenizer, how, cache=cache)[0] if rows.held_out else []
    return SplitPairs(training=training, held_out=held_out, report=report)
