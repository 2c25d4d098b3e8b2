"""Base of reward model training and DPO: an update and an evaluation over preference pairs. Subclasses add the loss."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Generic, TypeVar

import torch
from torch import Tensor

from proximo.data.preferences import PreferencePair
from proximo.learner.update import UpdateResult
from proximo.metrics.calibration import calibration
from proximo.metrics.values import Last, Mean, MetricValue, Sum
from proximo.run.task import Record
from proximo.supervised.pair_scores import PairMeasures, pair_metrics, pair_sample
from proximo.supervised.task import Config, Model, SupervisedTask, mean_loss

Batch = TypeVar("Batch")


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

        def measured(numbered: tuple[list[int], Batch]) -> tuple[list[int], float, PairMeasures]:
            indices, batch = numbered
            value, part = self.loss(batch, num_pairs=len(held_out))
            return indices, value.item(), part

        scores: dict[int, tuple[float, float]] = {}
        loss, parts = 0.0, []
        for indices, value, part in self.results_of(self.batches(held_out), measured):
            loss += value
            parts.append(part)
            scores |= dict(zip(indices, zip(part.scores.chosen, part.scores.rejected, strict=True), strict=True))
        total = reduce(add, parts)
        error = calibration(total.scores.gaps).error
        metrics = self.evaluation_metrics(total) | {
            "evaluation/pairs": Sum(len(held_out)),
            "evaluation/loss": Mean(loss * len(held_out), len(held_out)),
            "evaluation/calibration_error": Last(math.nan if error is None else error),
        }
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
