"""Process reward model training on labelled steps: its task, and how it is built from a recipe."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import add
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.special import entr
from transformers import PreTrainedTokenizerBase

from proximo.algorithms.process_rewards import step_loss
from proximo.data.codec import decode, response_text
from proximo.data.step_examples import StepExample, StepOptions, first_wrong, is_right, load_step_examples
from proximo.learner.update import UpdateResult
from proximo.metrics.calibration import probability_error
from proximo.metrics.values import Last, Mean, MetricValue, Sum
from proximo.models.packing import Packed, pack, pack_nothing, plan_own_share
from proximo.models.scalar import HeadStart, ScalarModel, mark_steps
from proximo.run.make.data import options_of
from proximo.run.make.models import build_scalar_model
from proximo.run.task import Record
from proximo.supervised.building import load_split, prepare_model, start, task_inputs
from proximo.supervised.prm_recipe import PRMConfig, PRMRecipe
from proximo.supervised.task import SupervisedTask, mean_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedSteps:
    """For each of several solutions the scores and the labels of its steps. The sum of two holds the solutions of both.

    A score is the log-odds that the step is right.
    """

    scores: tuple[tuple[float, ...], ...]
    labels: tuple[tuple[float, ...], ...]

    @classmethod
    def split(cls, scores: Tensor, labels: Tensor, num_steps: Sequence[int]) -> "JudgedSteps":
        """Of [steps] scores and labels, solution by solution. Waits for the device."""
        parts = [tuple(tuple(part.tolist()) for part in each.split(list(num_steps))) for each in (scores, labels)]
        return cls(scores=parts[0], labels=parts[1]) if num_steps else cls(scores=(), labels=())

    def __add__(self, other: "JudgedSteps") -> "JudgedSteps":
        return JudgedSteps(scores=self.scores + other.scores, labels=self.labels + other.labels)

    @property
    def all_labels(self) -> list[float]:
        """The labels of all steps."""
        return list(chain.from_iterable(self.labels))

    @property
    def probabilities(self) -> list[list[float]]:
        """For each solution the probabilities that its steps are right."""
        return [torch.tensor(scores, dtype=torch.float64).sigmoid().tolist() for scores in self.scores]

    @property
    def num_right(self) -> int:
        """Steps whose probability and label are on the same side of 1/2."""
        pairs = zip(chain.from_iterable(self.probabilities), self.all_labels, strict=True)
        return sum(is_right(probability) == is_right(label) for probability, label in pairs)

    def located(self, *, with_error: bool) -> Mean:
        """Fraction of the solutions with an error (or without one) whose first error is found (or that have none)."""
        found = [
            first_wrong(probabilities) == first_wrong(labels)
            for probabilities, labels in zip(self.probabilities, self.labels, strict=True)
            if (first_wrong(labels) is not None) == with_error
        ]
        return Mean(sum(found), len(found))


def training_metrics(group: str, judged: JudgedSteps) -> dict[str, MetricValue]:
    """Accuracy of an update's steps, and how they are labelled and judged on average."""
    labels = judged.all_labels
    return {
        f"{group}/step_accuracy": Mean(judged.num_right, len(labels)),
        f"{group}/label_mean": Mean.of(labels),
        f"{group}/probability_mean": Mean.of(list(chain.from_iterable(judged.probabilities))),
    }


def evaluation_metrics(judged: JudgedSteps) -> dict[str, MetricValue]:
    """Metrics of an evaluation, except its loss."""
    labels, probabilities = judged.all_labels, list(chain.from_iterable(judged.probabilities))
    mean = torch.tensor(labels, dtype=torch.float64).mean()
    return {
        "evaluation/solutions": Sum(len(judged.labels)),
        "evaluation/steps": Sum(len(labels)),
        "evaluation/constant_loss": Last((entr(mean) + entr(1 - mean)).item()),
        "evaluation/step_accuracy": Mean(judged.num_right, len(labels)),
        "evaluation/error_found": judged.located(with_error=True),
        "evaluation/right_accepted": judged.located(with_error=False),
        "evaluation/step_calibration_error": Last(probability_error(probabilities, labels)),
    }


def solution_sample(
    tokenizer: PreTrainedTokenizerBase, example: StepExample, scores: Sequence[float]
) -> dict[str, Any]:
    """A row of samples.jsonl: a solution with the labels of its steps, and the probabilities that they are right.

    Its `score` is the lowest of these.
    """
    probabilities = torch.tensor(scores, dtype=torch.float64).sigmoid().tolist()
    asked, answered = example.token_ids[: example.num_prompt_tokens], example.token_ids[example.num_prompt_tokens :]
    return {
        "kind": "evaluation",
        "prompt_id": example.id,
        "prompt": decode(tokenizer, asked),
        "response": response_text(tokenizer, asked, answered),
        "score": min(probabilities),
        "labels": list(example.labels),
        "probabilities": probabilities,
    }


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
        loss, order, parts = self.losses_of(self.batches(held_out), lambda batch: self.loss(batch, num_steps=num_steps))
        scores = dict(zip(order, chain.from_iterable(part.scores for part in parts), strict=True))
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


def build_task(recipe: PRMRecipe) -> PRMTask:
    """Load data, then the model, so that a bad data file fails before any weights are loaded."""
    begun = start(recipe, {"reward": recipe.model})
    options = options_of(StepOptions, recipe.data, separator=recipe.data.step_separator)
    split = load_split(load_step_examples, begun, options)
    model = build_scalar_model(
        recipe.model, begun.tokenizer, fresh_head=HeadStart.NORMAL, device_spec=begun.device_spec
    )
    mark_steps(model, recipe.data.step_separator)
    longest = max(len(example.token_ids) for example in split)
    fingerprint = prepare_model(recipe, model, begun, role="reward", longest=longest, dropout=recipe.prm.dropout)
    return PRMTask(task_inputs(recipe, model, begun, split, fingerprint=fingerprint, rows="solutions"))
