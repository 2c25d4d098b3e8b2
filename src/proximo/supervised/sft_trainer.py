"""Supervised fine-tuning: its task, and how it is built from a recipe."""

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from proximo.data.examples import ExampleOptions, TextExample, load_text_examples
from proximo.data.rows import Row
from proximo.learner.text_batches import text_batches, text_nats
from proximo.learner.update import UpdateResult
from proximo.metrics.values import ExponentialMean, Mean, MetricValue, Sum
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses
from proximo.run.make.data import options_of
from proximo.run.make.models import build_language_model
from proximo.run.task import Record
from proximo.supervised.building import load_split, prepare_model, start, task_inputs
from proximo.supervised.sft_recipe import SFTConfig, SFTRecipe
from proximo.supervised.task import SupervisedTask, TaskInputs, mean_loss


class SFTTask(SupervisedTask[LanguageModel, TextExample, SFTConfig]):
    """Minimises the mean negative log-likelihood per target token, over updates of `examples_per_step` examples."""

    role: ClassVar[str] = "policy"
    metric_group: ClassVar[str] = "sft"
    best_metric: str | None = "evaluation/loss"
    best_is_lowest: bool = True

    def __init__(
        self, inputs: TaskInputs[LanguageModel, TextExample, SFTConfig], *, held_out_characters: int = 0
    ) -> None:
        super().__init__(inputs)
        self.held_out_characters = held_out_characters

    @property
    def dropout(self) -> bool:
        """Whether the model trains with its own dropout."""
        return self.config.dropout

    def learn(
        self, examples: Sequence[TextExample], *, seed: int | None
    ) -> tuple[UpdateResult, dict[str, MetricValue], int]:
        """One update. The loss is the mean over the target tokens of all examples, in nats."""
        count = sum(example.num_targets for example in examples)
        result = self.learners[self.role].update(
            self.batches(examples), lambda batch: self._loss(batch, count), seed=seed
        )
        nats = mean_loss(result, count)
        metrics: dict[str, MetricValue] = {
            "sft/loss": nats,
            "sft/perplexity": ExponentialMean(nats.total, nats.count),
            "sft/tokens": Sum(count),
        }
        return result, metrics, sum(len(example.token_ids) for example in examples)

    @torch.no_grad()
    def evaluate(self, num_rows: int | None = None) -> Record | None:
        """Loss, perplexity and bits per character on the held-out examples, or the first `num_rows` of them."""
        held_out = self.held_out[:num_rows]
        if not held_out:
            return None
        nats = sum(nats for (nats,) in self.results_of(self.batches(held_out), self._nats))
        count = sum(example.num_targets for example in held_out)
        metrics: dict[str, MetricValue] = {
            "evaluation/loss": Mean(nats, count),
            "evaluation/perplexity": ExponentialMean(nats, count),
        }
        if len(held_out) == len(self.held_out):
            metrics["evaluation/bits_per_character"] = Mean(nats / math.log(2), self.held_out_characters)
        return Record(metrics=metrics)

    def batches(self, examples: Sequence[TextExample]) -> list[PackedResponses]:
        return text_batches(examples, token_budget=self.config.tokens_per_microbatch, device=self.model.device)

    def _loss(self, batch: PackedResponses, count: int) -> tuple[Tensor, None]:
        return text_nats(self.model, batch) / count, None

    def _nats(self, batch: PackedResponses) -> tuple[float]:
        return (text_nats(self.model, batch).item(),)


def build_task(recipe: SFTRecipe) -> SFTTask:
    """Load data, then the model, so that a bad data file fails before any weights are loaded."""
    begun = start(recipe, {"policy": recipe.model}, texts_of=texts_of)
    split = load_split(load_text_examples, begun, options_of(ExampleOptions, recipe.data))
    model = build_language_model(recipe.model, begun.tokenizer, device_spec=begun.device_spec)
    longest = max(len(example.token_ids) for example in split)
    fingerprint = prepare_model(recipe, model, begun, role="policy", longest=longest, dropout=recipe.sft.dropout)
    inputs = task_inputs(recipe, model, begun, split, fingerprint=fingerprint, rows="examples")
    return SFTTask(inputs, held_out_characters=split.held_out_report.num_characters if split.held_out_report else 0)


def texts_of(rows: Sequence[Row]) -> Iterator[str]:
    """All text of the rows, for training a tokenizer."""
    for row in rows:
        for value in row.values.values():
            yield from _texts(value)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for item in value.values() for text in _texts(item))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in _texts(item))
