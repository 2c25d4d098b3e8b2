"""Turns the scores of preference pairs into metrics and samples."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from proximo.algorithms.preference import pair_accuracy
from proximo.data.detokenise import decode, response_text
from proximo.data.preferences import PreferencePair
from proximo.metrics.values import Mean, MetricValue


@dataclass(frozen=True, kw_only=True, slots=True)
class PairScores:
    """Scores of the chosen and rejected responses of pairs. `correct`: pairs ranked as annotated; a tie counts half."""

    chosen: tuple[float, ...]
    rejected: tuple[float, ...]
    correct: float

    def __add__(self, other: "PairScores") -> "PairScores":
        return PairScores(
            chosen=self.chosen + other.chosen,
            rejected=self.rejected + other.rejected,
            correct=self.correct + other.correct,
        )

    @property
    def gaps(self) -> list[float]:
        """Chosen minus rejected score of each pair."""
        return [chosen - rejected for chosen, rejected in zip(self.chosen, self.rejected, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairMeasures:
    """Measurements of a batch of pairs. The sum of two holds the pairs of both."""

    scores: PairScores
    """Scores of a reward model, or implicit rewards of a policy."""
    logprobs: PairScores | None = None
    """Log-probs of whole responses under the policy, in nats; None for a reward model."""

    def __add__(self, other: "PairMeasures") -> "PairMeasures":
        both = self.logprobs is not None and other.logprobs is not None
        return PairMeasures(
            scores=self.scores + other.scores, logprobs=self.logprobs + other.logprobs if both else None
        )


def pair_scores(chosen: Tensor, rejected: Tensor) -> PairScores:
    """Converts [num_pairs] scores of chosen and rejected responses. Waits for the device."""
    return PairScores(
        chosen=tuple(chosen.tolist()),
        rejected=tuple(rejected.tolist()),
        correct=pair_accuracy(chosen, rejected).sum().item(),
    )


def pair_metrics(group: str, total: PairScores) -> dict[str, MetricValue]:
    """Pair accuracy, mean scores and mean margin, as metrics of `group`."""
    return {
        f"{group}/pair_accuracy": Mean(total.correct, len(total.chosen)),
        f"{group}/score_chosen_mean": Mean.of(total.chosen),
        f"{group}/score_rejected_mean": Mean.of(total.rejected),
        f"{group}/margin_mean": Mean.of(total.gaps),
    }


def pair_sample(
    tokenizer: PreTrainedTokenizerBase, pair: PreferencePair, scores: tuple[float, float]
) -> dict[str, Any]:
    """A row of samples.jsonl: a pair with its (chosen, rejected) scores."""
    return {
        "kind": "pair",
        "prompt_id": pair.id,
        "prompt": decode(tokenizer, pair.prompt_token_ids),
        "chosen": response_text(tokenizer, pair.prompt_token_ids, pair.chosen_token_ids),
        "rejected": response_text(tokenizer, pair.prompt_token_ids, pair.rejected_token_ids),
        "score_chosen": scores[0],
        "score_rejected": scores[1],
    }
