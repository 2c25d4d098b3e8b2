"""Supervised fine-tuning, step by step. Not the reading of its recipe (sft.py) nor the run around it (loop.py)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from proximo.algorithms.losses import sft_loss
from proximo.config.recipes import SFTConfig
from proximo.data.examples import TextExample
from proximo.learner.update import UpdateResult
from proximo.metrics.trainers import Trainer
from proximo.metrics.values import ExponentialMean, Mean, MetricValue, Sum
from proximo.models.batching import plan_batches
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack
from proximo.trainers.loop import Record
from proximo.trainers.supervised_task import SupervisedTask, mean_loss


class SFTTask(SupervisedTask[LanguageModel, TextExample, SFTConfig]):
    """Minimises the negative log-likelihood per counted token, over updates of `examples_per_step` examples."""

    trainer: Trainer = Trainer.SFT
    role: ClassVar[str] = "policy"
    metric_group: ClassVar[str] = "sft"
    best_metric: str | None = "evaluation/loss"
    best_is_lowest: bool = True

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        examples: Sequence[TextExample],
        held_out: Sequence[TextExample],
        *,
        config: SFTConfig,
        seed: int,
        inputs_fingerprint: Mapping[str, Any],
        notes: Sequence[str] = (),
        held_out_characters: int = 0,
    ) -> None:
        super().__init__(
            model,
            tokenizer,
            examples,
            held_out,
            config=config,
            examples_per_step=config.examples_per_step,
            seed=seed,
            inputs_fingerprint=inputs_fingerprint,
            notes=notes,
        )
        self.dropout = config.dropout
        self.held_out_characters = held_out_characters

    def learn(
        self, chosen: Sequence[TextExample], *, seed: int | None
    ) -> tuple[UpdateResult, dict[str, MetricValue], int]:
        """One update; the loss is the mean over the counted tokens of all of them."""
        count = sum(example.num_targets for example in chosen)
        result = self.learners[self.role].update(
            self._batches(chosen), lambda batch: self._loss(batch, count), seed=seed
        )
        nats = mean_loss(result, count)
        own: dict[str, MetricValue] = {
            "sft/loss": nats,
            "sft/perplexity": ExponentialMean(nats.total, nats.count),
            "sft/tokens": Sum(count),
        }
        return result, own, sum(len(example.token_ids) for example in chosen)

    @torch.no_grad()
    def evaluate(self, num_rows: int | None = None) -> Record | None:
        """Loss, perplexity and bits per character on the held-out examples, or the first `num_rows` of them."""
        held_out = self.held_out[:num_rows]
        if not held_out:
            return None
        nats = sum(self._loss(batch, 1)[0].item() for batch in self._batches(held_out))
        count = sum(example.num_targets for example in held_out)
        metrics: dict[str, MetricValue] = {
            "evaluation/loss": Mean(nats, count),
            "evaluation/perplexity": ExponentialMean(nats, count),
        }
        if len(held_out) == len(self.held_out):
            metrics["evaluation/bits_per_character"] = Mean(nats / math.log(2), self.held_out_characters)
        return Record(metrics=metrics)

    def _batches(self, examples: Sequence[TextExample]) -> list[PackedResponses]:
        lengths = [len(example.token_ids) for example in examples]
        plan = plan_batches(lengths, token_budget=self.config.tokens_per_microbatch)
        return [pack_examples([examples[i] for i in indices], device=self.model.device) for indices in plan]

    def _loss(self, batch: PackedResponses, count: int) -> tuple[Tensor, None]:
        logprobs = self.model.response_logprobs(batch, temperature=1.0).logprobs
        return sft_loss(logprobs).sum() / count, None


def pack_examples(examples: Sequence[TextExample], *, device: torch.device) -> PackedResponses:
    """Pack whole examples; the counted tokens are the targets."""
    packed = pack([example.token_ids for example in examples], device=device)
    flags = torch.tensor([flag for example in examples for flag in example.loss_mask], dtype=torch.bool, device=device)
    positions = flags.nonzero().squeeze(1)
    return PackedResponses(
        packed=packed,
        predictors=positions - 1,
        targets=packed.token_ids[positions],
        value_positions=positions.new_empty(0),
        response_lengths=tuple(example.num_targets for example in examples),
    )
