"""The training task of a process reward model on labelled steps. The loop that drives it: run/loop.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import add
from typing import ClassVar

import torch
from torch import Tensor

from proximo.algorithms.process import step_loss
from proximo.data.stepwise.examples import StepExample
from proximo.learner.update import UpdateResult
from proximo.metrics.values import Mean, MetricValue, Sum
from proximo.models.batching import plan_own_share
from proximo.models.packing import Packed, pack, pack_nothing
from proximo.models.scalar import ScalarModel
from proximo.run.task import Record
from proximo.supervised.prm.recipe import PRMConfig
from proximo.supervised.prm.step_scores import JudgedSteps, evaluation_metrics, solution_sample, training_metrics
from proximo.supervised.task import SupervisedTask, mean_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """A micro-batch of solutions, packed."""

    packed: Packed
    """Of no solution, one token that is not scored."""
    ends: Tensor
    """Flat indices of the last tokens of the steps that count, solution by solution."""
    labels: Tensor
    """For each of these steps its label."""
    num_steps: tuple[int, ...]
    """For each solution the number of these steps."""

    @property
    def tokens(self) -> Packed:
        """All tokens of the micro-batch."""
        return self.packed


class PRMTask(SupervisedTask[ScalarModel, StepExample, PRMConfig]):
    """Minimises the mean binary cross entropy per step, over updates of `solutions_per_step` solutions."""

    role: ClassVar[str] = "reward"
    metric_group: ClassVar[str] = "prm"
    best_metric: str | None = "evaluation/loss"
    best_is_lowest: bool = True

    @property
    def dropout(self) -> bool:
        """Whether the model trains with its own dropout."""
        return self.config.dropout

    def learn(
        self, examples: Sequence[StepExample], *, seed: int | None
    ) -> tuple[UpdateResult, dict[str, MetricValue], int]:
        """One update. The loss is the mean over the steps of all examples, in nats."""
        num_steps = sum(len(example.labels) for example in examples)
        result = self.learners[self.role].update(
            [batch for _, batch in self.batches(examples)],
            lambda batch: self.loss(batch, num_steps=num_steps),
            seed=seed,
        )
        metrics = training_metrics(self.metric_group, reduce(add, result.statistics)) | {
            f"{self.metric_group}/loss": mean_loss(result, num_steps),
            f"{self.metric_group}/solutions": Sum(len(examples)),
            f"{self.metric_group}/steps": Sum(num_steps),
        }
        return result, metrics, sum(len(example.token_ids) for example in examples)

    @torch.no_grad()
    def evaluate(self, num_rows: int | None = None) -> Record | None:
        """Loss, accuracies and calibration on the held-out solutions, which go to samples.jsonl with their scores."""
        held_out = self.held_out[:num_rows]
        if not held_out:
            return None
        num_steps = sum(len(example.labels) for example in held_out)

        def measured(numbered: tuple[list[int], StepBatch]) -> tuple[list[int], float, JudgedSteps]:
            indices, batch = numbered
            value, part = self.loss(batch, num_steps=num_steps)
            return indices, value.item(), part

        loss, scores = 0.0, dict[int, tuple[float, ...]]()
        for indices, value, part in self.results_of(self.batches(held_out), measured):
            loss += value
            scores |= dict(zip(indices, part.scores, strict=True))
        in_order = tuple(scores[index] for index in range(len(held_out)))
        judged = JudgedSteps(scores=in_order, labels=tuple(example.labels for example in held_out))
        metrics = evaluation_metrics(judged) | {"evaluation/loss": Mean(loss * num_steps, num_steps)}
        rows = [solution_sample(self.tokenizer, *pair) for pair in zip(held_out, in_order, strict=True)]
        return Record(metrics=metrics, samples=rows)

    def batches(self, examples: Sequence[StepExample]) -> list[tuple[list[int], StepBatch]]:
        """This rank's micro-batches of the examples. Each comes with the indices of its examples in `examples`."""
        plan = plan_own_share(
            [len(example.token_ids) for example in examples], token_budget=self.config.tokens_per_microbatch
        )
        return [(indices, self._batch([examples[i] for i in indices])) for indices in plan]

    def _batch(self, examples: Sequence[StepExample]) -> StepBatch:
        device = self.model.device
        labels = torch.tensor(list(chain.from_iterable(example.labels for example in examples)), device=device)
        if not examples:
            nothing = pack_nothing(device)
            return StepBatch(packed=nothing.packed, ends=nothing.predictors, labels=labels, num_steps=())
        packed = pack([example.token_ids for example in examples], device=device)
        starts = [
            last + 1 - len(example.token_ids)
            for last, example in zip(packed.last_indices.tolist(), examples, strict=True)
        ]
        ends = [start + end for start, example in zip(starts, examples, strict=True) for end in example.ends]
        return StepBatch(
            packed=packed,
            ends=torch.tensor(ends, device=device),
            labels=labels,
            num_steps=tuple(len(example.labels) for example in examples),
        )

    def loss(self, batch: StepBatch, *, num_steps: int) -> tuple[Tensor, JudgedSteps]:
        """Sum of a batch's step losses divided by `num_steps` (steps of the whole update), and the steps' scores."""
        # Without a solution the one token has a score, so that the pass has a gradient, and no label.
        scores = self.model.token_scores(batch.packed, batch.ends)[: len(batch.labels)]
        total = step_loss(scores, batch.labels.to(scores.dtype)).sum() / num_steps
        return total, JudgedSteps.split(scores.detach(), batch.labels, batch.num_steps)
