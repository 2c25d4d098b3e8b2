"""Training of a reward model on preference pairs, step by step. Not the run around it (loop.py)."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from proximo.algorithms.preference import TokenScores, bradley_terry, divergence_window, pair_accuracy
from proximo.checkpoint.store import Checkpoint, Writer
from proximo.config.recipes import RewardTrainingConfig
from proximo.data.order import rows_at
from proximo.data.preferences import PreferencePair
from proximo.learner.update import Learner
from proximo.metrics.calibration import calibration
from proximo.metrics.trainers import Trainer
from proximo.metrics.values import Last, Max, Mean, MetricValue, Sum
from proximo.models.batching import plan_batches
from proximo.models.packing import Packed, pack
from proximo.models.scalar import ScalarModel
from proximo.models.vocabulary import decode_text
from proximo.trainers.loop import Record
from proximo.trainers.measuring import peak_memory_mib
from proximo.trainers.saving import restore_models, update_counts, writers_for
from proximo.trainers.sections import optimizer_options


@dataclass(frozen=True, kw_only=True, slots=True)
class PairBatch:
    """Pairs of one pass: all chosen sequences, then all rejected ones, packed."""

    packed: Packed
    num_pairs: int
    margins: Tensor | None
    """[num_pairs]"""


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


class RewardTask:
    """Teaches the chosen answer of a pair to score above the rejected one."""

    trainer: Trainer = Trainer.REWARD
    best_metric: str | None = "evaluation/pair_accuracy"
    best_is_lowest: bool = False

    def __init__(
        self,
        model: ScalarModel,
        tokenizer: PreTrainedTokenizerBase,
        pairs: Sequence[PreferencePair],
        held_out: Sequence[PreferencePair],
        *,
        config: RewardTrainingConfig,
        seed: int,
        inputs_fingerprint: Mapping[str, Any],
        notes: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.pairs = pairs
        self.held_out = held_out
        self.config = config
        self.seed = seed
        self.inputs_fingerprint = inputs_fingerprint
        self.notes = notes
        self.device = str(model.device)
        self.num_steps = max(1, math.ceil(config.num_epochs * len(pairs) / config.pairs_per_step))
        self.learners = {
            "reward": Learner(model.model, optimizer_options(config.optimizer), num_updates=self.num_steps)
        }

    def step(self, step: int) -> Record:
        """One update over the next pairs in the order of their epoch."""
        start = time.perf_counter()
        size = self.config.pairs_per_step
        indices = rows_at((step - 1) * size, size, num_rows=len(self.pairs), seed=self.seed)
        chosen = [self.pairs[i] for i in indices]
        result = self.learners["reward"].update(
            [batch for _, batch in self._batches(chosen)],
            lambda batch: self._loss(batch, num_pairs=len(chosen)),
            seed=(self.seed << 32) + step * 65_536 if self.config.dropout else None,
        )
        seconds = time.perf_counter() - start
        skipped = result.refusal is not None
        total = reduce(add, result.statistics)
        read = sum(
            len(pair.prompt_token_ids) * 2 + len(pair.chosen_token_ids) + len(pair.rejected_token_ids)
            for pair in chosen
        )
        return Record(
            metrics=_pair_metrics("reward_model", total)
            | {
                "reward_model/loss": Mean(0, 0) if skipped else Mean(result.loss * len(chosen), len(chosen)),
                "reward_model/gradient_norm": Mean(0, 0) if skipped else Mean(result.gradient_norm, 1),
                "reward_model/learning_rate": Last(result.learning_rate),
                "reward_model/pairs": Sum(len(chosen)),
                "reward_model/skipped_updates": Sum(int(skipped)),
                "progress/epoch": Last(step * size / len(self.pairs)),
                "time/step_seconds": Sum(seconds),
                "throughput/train_tokens_per_second": Mean(read, seconds),
                "memory/peak_mib": Max(peak_memory_mib(self.model.device)),
            }
        )

    @torch.no_grad()
    def evaluate(self, num_rows: int | None = None) -> Record | None:
        """Accuracy and calibration on the held-out pairs, each of which goes to samples.jsonl with its scores."""
        held_out = self.held_out[:num_rows]
        if not held_out:
            return None
        scores: dict[int, tuple[float, float]] = {}
        loss, total = 0.0, PairScores(chosen=(), rejected=(), correct=0.0)
        for indices, batch in self._batches(held_out):
            value, part = self._loss(batch, num_pairs=len(held_out))
            loss, total = loss + value.item(), total + part
            scores |= dict(zip(indices, zip(part.chosen, part.rejected, strict=True), strict=True))
        metrics = _pair_metrics("evaluation", total) | {
            "evaluation/loss": Mean(loss * len(scores), len(scores)),
            "evaluation/calibration_error": Last(calibration(total.gaps).error),
        }
        rows = [_sample(self.tokenizer, pair, scores[i]) for i, pair in enumerate(held_out)]
        return Record(metrics=metrics, samples=rows)

    def writers(self) -> Mapping[str, Writer]:
        """The model as `reward`, and its optimizer."""
        return writers_for({"reward": self.model}, self.learners, self.tokenizer)

    def state(self) -> Mapping[str, Any]:
        """The position in the schedule; data order is a function of the step."""
        return {"updates": update_counts(self.learners)}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Weights and optimizer."""
        restore_models(checkpoint, {"reward": self.model}, self.learners)

    def _batches(self, pairs: Sequence[PreferencePair]) -> list[tuple[list[int], PairBatch]]:
        sequences = [pair_sequences(pair) for pair in pairs]
        lengths = [len(chosen) + len(rejected) for chosen, rejected in sequences]
        batches = []
        for indices in plan_batches(lengths, token_budget=self.config.tokens_per_microbatch):
            chosen, rejected = zip(*(sequences[i] for i in indices), strict=True)
            given = [pairs[i].margin for i in indices]
            margins = None
            if any(margin is not None for margin in given):
                margins = torch.tensor([margin or 0.0 for margin in given], device=self.model.device)
            packed = pack([*chosen, *rejected], device=self.model.device)
            batches.append((indices, PairBatch(packed=packed, num_pairs=len(indices), margins=margins)))
        return batches

    def _loss(self, batch: PairBatch, *, num_pairs: int) -> tuple[Tensor, PairScores]:
        if self.config.loss == "divergence_window":
            scores = self.model.token_scores(batch.packed)
            chosen, rejected = scores[batch.packed.last_indices].split(batch.num_pairs)
            per_pair = divergence_window(*_token_scores(batch, scores))
        else:
            chosen, rejected = self.model.sequence_scores(batch.packed).split(batch.num_pairs)
            per_pair = bradley_terry(chosen, rejected, margin=batch.margins, centring=self.config.centring)
        return per_pair.sum() / num_pairs, _pair_scores(chosen.detach(), rejected.detach())


def pair_sequences(pair: PreferencePair) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompt with the chosen answer, prompt with the rejected one."""
    prompt = pair.prompt_token_ids
    return (*prompt, *pair.chosen_token_ids), (*prompt, *pair.rejected_token_ids)


def _token_scores(batch: PairBatch, scores: Tensor) -> tuple[TokenScores, TokenScores]:
    lengths = batch.packed.lengths
    halves = lengths[: batch.num_pairs], lengths[batch.num_pairs :]
    cut = sum(halves[0])
    ids = batch.packed.token_ids
    return (
        TokenScores(token_ids=ids[:cut], scores=scores[:cut], lengths=halves[0]),
        TokenScores(token_ids=ids[cut:], scores=scores[cut:], lengths=halves[1]),
    )


def _pair_scores(chosen: Tensor, rejected: Tensor) -> PairScores:
    return PairScores(
        chosen=tuple(chosen.tolist()),
        rejected=tuple(rejected.tolist()),
        correct=pair_accuracy(chosen, rejected).sum().item(),
    )


def _pair_metrics(group: str, total: PairScores) -> dict[str, MetricValue]:
    return {
        f"{group}/pair_accuracy": Mean(total.correct, len(total.chosen)),
        f"{group}/score_chosen_mean": Mean.of(total.chosen),
        f"{group}/score_rejected_mean": Mean.of(total.rejected),
        f"{group}/margin_mean": Mean.of(total.gaps),
    }


def _sample(tokenizer: PreTrainedTokenizerBase, pair: PreferencePair, scores: tuple[float, float]) -> dict[str, Any]:
    return {
        "kind": "pair",
        "prompt_id": pair.id,
        "prompt": decode_text(tokenizer, pair.prompt_token_ids),
        "chosen": decode_text(tokenizer, pair.chosen_token_ids),
        "rejected": decode_text(tokenizer, pair.rejected_token_ids),
        "score_chosen": scores[0],
        "score_rejected": scores[1],
    }
