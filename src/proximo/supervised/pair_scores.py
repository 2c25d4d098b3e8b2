"""The scores of the two answers of preference pairs, as metrics and samples. Not where the scores come from."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from proximo.algorithms.preference import pair_accuracy
from proximo.data.preferences import PreferencePair
from proximo.metrics.values import Mean, MetricValue
from proximo.models.pretrained.vocabulary import decode_text


@dataclass(frozen=True, kw_only=True, slots=True)
class PairScores:
    """The scores of some pairs, and whether the model ranked them as the annotators did (a tie counts half)."""

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
    """What is seen of some pairs."""

    scores: PairScores
    """Those of a reward model, or the implicit rewards of a policy."""
    logprobs: PairScores | None = None
    """Of whole answers under a policy, in nats."""

    def __add__(self, other: "PairMeasures") -> "PairMeasures":
        both = self.logprobs is not None and other.logprobs is not None
        return PairMeasures(
            scores=self.scores + other.scores, logprobs=self.logprobs + other.logprobs if both else None
        )


def pair_scores(chosen: Tensor, rejected: Tensor) -> PairScores:
    """From [N] scores of the chosen and of the rejected answers."""
    return PairScores(
        chosen=tuple(chosen.tolist()),
        rejected=tuple(rejected.tolist()),
        correct=pair_accuracy(chosen, rejected).sum().item(),
    )


def pair_metrics(group: str, total: PairScores) -> dict[str, MetricValue]:
    """Accuracy, mean scores and mean margin under the names that reward training and every evaluation of pairs use."""
    return {
        f"{group}/pair_accuracy": Mean(total.correct, len(total.chosen)),
        f"{group}/score_chosen_mean": Mean.of(total.chosen),
        f"{group}/score_rejected_mean": Mean.of(total.rejected),
        f"{group}/margin_mean": Mean.of(total.gaps),
    }


def pair_sample(
    tokenizer: PreTrainedTokenizerBase, pair: PreferencePair, scores: tuple[float, float]
) -> dict[str, Any]:
    """The row of samples.jsonl that shows a pair with the scores of its two answers."""
    return {
        "kind": "pair",
        "prompt_id": pair.id,
        "prompt": decode_text(tokenizer, pair.prompt_token_ids),
        "chosen": decode_text(tokenizer, pair.chosen_token_ids),
        "rejected": decode_text(tokenizer, pair.rejected_token_ids),
        "score_chosen": scores[0],
        "score_rejected": scores[1],
    }
