"""Supervised fine-tuning, step by step. Not the reading of its recipe (sft.py) nor the run around it (loop.py)."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from proximo.algorithms.losses import sft_loss
from proximo.checkpoint.store import Checkpoint, Writer
from proximo.config.recipes import SFTConfig
from proximo.data.examples import TextExample
from proximo.data.order import rows_at
from proximo.learner.update import Learner
from proximo.metrics.trainers import Trainer
from proximo.metrics.values import ExponentialMean, Last, Max, Mean, MetricValue, Sum
from proximo.models.batching import plan_batches
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack
from proximo.trainers.loop import Record
from proximo.trainers.measuring import peak_memory_mib
from proximo.trainers.saving import restore_models, update_counts, writers_for
from proximo.trainers.sections import optimizer_options


class SFTTask:
    """Minimises the negative log-likelihood per counted token, over updates of `examples_per_step` examples."""

    trainer: Trainer = Trainer.SFT
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
        self.model = model
        self.tokenizer = tokenizer
        self.examples = examples
        self.held_out = held_out
        self.config = config
        self.seed = seed
        self.inputs_fingerprint = inputs_fingerprint
        self.notes = notes
        self.held_out_characters = held_out_characters
        self.device = str(model.device)
        self.num_steps = max(1, math.ceil(config.num_epochs * len(examples) / config.examples_per_step))
        self.learners = {
            "policy": Learner(model.model, optimizer_options(config.optimizer), num_updates=self.num_steps)
        }

    def step(self, step: int) -> Record:
        """One update over the next examples in the order of their epoch."""
        start = time.perf_counter()
        size = self.config.examples_per_step
        indices = rows_at((step - 1) * size, size, num_rows=len(self.examples), seed=self.seed)
        chosen = [self.examples[i] for i in indices]
        count = sum(example.num_targets for example in chosen)
        result = self.learners["policy"].update(
            self._batches(chosen), lambda batch: self._loss(batch, count), seed=self._dropout_seed(step)
        )
        seconds = time.perf_counter() - start
        read = sum(len(example.token_ids) for example in chosen)
        skipped = result.refusal is not None
        nats = Mean(0, 0) if skipped else Mean(result.loss * count, count)
        return Record(
            metrics={
                "sft/loss": nats,
                "sft/perplexity": ExponentialMean(nats.total, nats.count),
                "sft/tokens": Sum(count),
                "sft/gradient_norm": Mean(0, 0) if skipped else Mean(result.gradient_norm, 1),
                "sft/learning_rate": Last(result.learning_rate),
                "sft/skipped_updates": Sum(int(skipped)),
                "progress/epoch": Last(step * size / len(self.examples)),
                "time/step_seconds": Sum(seconds),
                "throughput/train_tokens_per_second": Mean(read, seconds),
                "memory/peak_mib": Max(peak_memory_mib(self.model.device)),
            }
        )

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

    def writers(self) -> Mapping[str, Writer]:
        """The model as `policy`, and its optimizer."""
        return writers_for({"policy": self.model}, self.learners, self.tokenizer)

    def state(self) -> Mapping[str, Any]:
        """The position in the schedule; data order is a function of the step."""
        return {"updates": update_counts(self.learners)}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Weights and optimizer."""
        restore_models(checkpoint, {"policy": self.model}, self.learners)

    def _batches(self, examples: Sequence[TextExample]) -> list[PackedResponses]:
        lengths = [len(example.token_ids) for example in examples]
        plan = plan_batches(lengths, token_budget=self.config.tokens_per_microbatch)
        return [pack_examples([examples[i] for i in indices], device=self.model.device) for indices in plan]

    def _loss(self, batch: PackedResponses, count: int) -> tuple[Tensor, None]:
        logprobs = self.model.response_logprobs(batch, temperature=1.0).logprobs
        return sft_loss(logprobs).sum() / count, None

    def _dropout_seed(self, step: int) -> int | None:
        return (self.seed << 32) + step * 65_536 if self.config.dropout else None


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
