"""Training of a reward model on preference pairs, step by step. Not the run around it (run/loop.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from proximo.algorithms.preference import TokenScores, bradley_terry, divergence_window
from proximo.data.preferences import PreferencePair
from proximo.metrics.values import MetricValue
from proximo.models.batching import plan_batches
from proximo.models.packing import Packed, pack
from proximo.models.scalar import ScalarModel
from proximo.supervised.pair_scores import PairMeasures, pair_metrics, pair_scores
from proximo.supervised.pair_task import PairTask
from proximo.supervised.reward.recipe import RewardTrainingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PairBatch:
    """Pairs of one pass: all chosen sequences, then all rejected ones, packed."""

    packed: Packed
    num_pairs: int
    scored: Tensor
    """[R] flat indices of the tokens whose scores the loss reads, in order; the last of each sequence is among them."""
    margins: Tensor | None
    """[num_pairs]"""


class RewardTask(PairTask[ScalarModel, RewardTrainingConfig, PairBatch]):
    """Teaches the chosen answer of a pair to score above the rejected one."""

    role: ClassVar[str] = "reward"
    metric_group: ClassVar[str] = "reward_model"
    best_metric: str | None = "evaluation/pair_accuracy"
    best_is_lowest: bool = False

    @property
    def dropout(self) -> bool:
        """Whether the model keeps its own dropout in training."""
        return self.config.dropout

    def training_metrics(self, total: PairMeasures) -> dict[str, MetricValue]:
        return pair_metrics(self.metric_group, total.scores)

    def batches(self, pairs: Sequence[PreferencePair]) -> list[tuple[list[int], PairBatch]]:
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
            scored = packed.last_indices
            if self.config.loss == "divergence_window":
                scored = torch.tensor(_behind_common_starts(chosen, rejected), device=self.model.device)
            batch = PairBatch(packed=packed, num_pairs=len(indices), scored=scored, margins=margins)
            batches.append((indices, batch))
        return batches

    def loss(self, batch: PairBatch, *, num_pairs: int) -> tuple[Tensor, PairMeasures]:
        scores = self.model.token_scores(batch.packed, batch.scored)
        if self.config.loss == "divergence_window":
            # What stands before the first difference is outside the window, whatever its score.
            scores = scores.new_zeros(batch.packed.num_tokens).index_copy(0, batch.scored, scores)
            chosen, rejected = scores[batch.packed.last_indices].split(batch.num_pairs)
            per_pair = divergence_window(*_token_scores(batch, scores))
        else:
            chosen, rejected = scores.split(batch.num_pairs)
            per_pair = bradley_terry(chosen, rejected, margin=batch.margins, centring=self.config.score_centring)
        return per_pair.sum() / num_pairs, PairMeasures(scores=pair_scores(chosen.detach(), rejected.detach()))


def pair_sequences(pair: PreferencePair) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompt with the chosen answer, prompt with the rejected one."""
    prompt = pair.prompt_token_ids
    return (*prompt, *pair.chosen_token_ids), (*prompt, *pair.rejected_token_ids)


def _behind_common_starts(chosen: Sequence[Sequence[int]], rejected: Sequence[Sequence[int]]) -> list[int]:
    """Flat indices, in the packing of all chosen and then all rejected, from where the two of a pair differ.

    At least the last token of each: one may be the beginning of the other.
    """
    differ = [
        next((i for i, (one, other) in enumerate(zip(*pair, strict=False)) if one != other), min(map(len, pair)))
        for pair in zip(chosen, rejected, strict=True)
    ]
    indices: list[int] = []
    start = 0
    for sequence, first in zip([*chosen, *rejected], [*differ, *differ], strict=True):
        indices.extend(range(start + min(first, len(sequence) - 1), start + len(sequence)))
        start += len(sequence)
    return indices


def _token_scores(batch: PairBatch, scores: Tensor) -> tuple[TokenScores, TokenScores]:
    lengths = batch.packed.lengths
    halves = lengths[: batch.num_pairs], lengths[batch.num_pairs :]
    cut = sum(halves[0])
    ids = batch.packed.token_ids
    return (
        TokenScores(token_ids=ids[:cut], scores=scores[:cut], lengths=halves[0]),
        TokenScores(token_ids=ids[cut:], scores=scores[cut:], lengths=halves[1]),
    )
