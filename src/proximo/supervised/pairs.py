"""Preference pairs, for reward model training and DPO: their scores, and a task that updates and evaluates on them."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from proximo.algorithms.preferences import pair_accuracy
from proximo.config.data import PreferenceDataConfig
from proximo.data.codec import decode, response_text
from proximo.data.preferences import PairOptions, PreferencePair, load_preference_pairs
from proximo.data.templates.chat import Learned
from proximo.learner.update import UpdateResult
from proximo.message_text import count_of
from proximo.metrics.calibration import pair_error
from proximo.metrics.values import Last, Mean, MetricValue, Sum
from proximo.run.make.data import options_of
from proximo.run.task import Record
from proximo.supervised.building import Split, Start, load_split
from proximo.supervised.task import Config, Model, SupervisedTask, mean_loss

Batch = TypeVar("Batch")


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


def load_pairs(data: PreferenceDataConfig, begun: Start, *, learned: Learned) -> Split[PreferencePair]:
    """Tokenise rows into pairs. Raises DataError for a malformed row, and if no pair is left.

    `learned`: `responses` if a policy learns their tokens, `last` if a reward model reads them.
    """
    return load_split(load_preference_pairs, begun, options_of(PairOptions, data, learned=learned))


def longest_pair(pairs: Iterable[PreferencePair]) -> int:
    """Tokens of the longest prompt plus response."""
    return max(
        len(pair.prompt_token_ids) + max(len(pair.chosen_token_ids), len(pair.rejected_token_ids)) for pair in pairs
    )


def unused_margins(pairs: Sequence[PreferencePair], why: str) -> list[str]:
    """A note if pairs have margins (by how much the chosen response is better) and the loss ignores them."""
    count = sum(pair.margin is not None for pair in pairs)
    return [f"the margins of {count_of(count, 'pair')} are not used: {why}"] if count else []


class PairTask(SupervisedTask[Model, PreferencePair, Config], Generic[Model, Config, Batch]):
    """A task over preference pairs. A subclass packs pairs into batches and computes the loss of a batch."""

    def learn(
        self, examples: Sequence[PreferencePair], *, seed: int | None
    ) -> tuple[UpdateResult, dict[str, MetricValue], int]:
        """One update. The loss is the mean over the pairs."""
        result = self.learners[self.role].update(
            [batch for _, batch in self.batches(examples)],
            lambda batch: self.loss(batch, num_pairs=len(examples)),
            seed=seed,
        )
        metrics = self.training_metrics(reduce(add, result.statistics)) | {
            f"{self.metric_group}/loss": mean_loss(result, len(examples)),
            f"{self.metric_group}/pairs": Sum(len(examples)),
        }
        return result, metrics, sum(pair.num_tokens for pair in examples)

    @torch.no_grad()
    def evaluate(self, num_rows: int | None = None) -> Record | None:
        """Loss, accuracy and calibration on the held-out pairs. Every pair goes to samples.jsonl with its scores."""
        held_out = self.held_out[:num_rows]
        if not held_out:
            return None
        loss, order, parts = self.losses_of(
            self.batches(held_out), lambda batch: self.loss(batch, num_pairs=len(held_out))
        )
        total = reduce(add, parts)
        error = pair_error(total.scores.gaps)
        metrics = self.evaluation_metrics(total) | {
            "evaluation/pairs": Sum(len(held_out)),
            "evaluation/loss": Mean(loss * len(held_out), len(held_out)),
            "evaluation/calibration_error": Last(math.nan if error is None else error),
        }
        scores = dict(zip(order, zip(total.scores.chosen, total.scores.rejected, strict=True), strict=True))
        rows = [pair_sample(self.tokenizer, pair, scores[i]) for i, pair in enumerate(held_out)]
        return Record(metrics=metrics, samples=rows)

    @abstractmethod
    def batches(self, pairs: Sequence[PreferencePair]) -> list[tuple[list[int], Batch]]:
        """Micro-batches of the pairs. Each comes with the indices of its pairs in `pairs`."""

    @abstractmethod
    def loss(self, batch: Batch, *, num_pairs: int) -> tuple[Tensor, PairMeasures]:
        """Sum of a batch's pair losses divided by `num_pairs` (pairs of the whole update), and its measurements."""

    @abstractmethod
    def training_metrics(self, total: PairMeasures) -> dict[str, MetricValue]:
        """Metrics of an update, except its loss and number of pairs."""

    def evaluation_metrics(self, total: PairMeasures) -> dict[str, MetricValue]:
        """Metrics of an evaluation, except loss, number of pairs and calibration."""
        return pair_metrics("evaluation", total.scores)
