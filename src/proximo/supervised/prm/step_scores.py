"""Turns the scores of labelled steps into metrics and samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.special import entr
from transformers import PreTrainedTokenizerBase

from proximo.data.detokenise import decode, response_text
from proximo.data.stepwise.examples import StepExample, first_wrong, is_right
from proximo.metrics.calibration import probability_error
from proximo.metrics.values import Last, Mean, MetricValue, Sum


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
