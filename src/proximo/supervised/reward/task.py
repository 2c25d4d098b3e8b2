"""The training task of a reward model on preference pairs. The loop that drives it: run/loop.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from proximo.algorithms.preference import TokenScores, bradley_terry, divergence_window
from proximo.data.preferences import PreferencePair
from proximo.metrics.values import MetricValue
from proximo.models.batching import plan_own_share
from proximo.models.packing import Packed, pack, pack_nothing
from proximo.models.scalar import ScalarModel
from proximo.supervised.pair_scores import PairMeasures, pair_metrics, pair_scores
from proximo.supervised.pair_task import PairTask
from proximo.supervised.reward.recipe import RewardTrainingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PairBatch:
    """A micro-batch of pairs, packed: all chosen sequences, then all rejected ones."""

    packed: Packed
    """Of no pair, one token that is not scored."""
    num_pairs: int
    scored: Tensor
    """[num_scored] increasing flat indices of the tokens that the loss reads, the last of each sequence among them."""
    margins: Tensor | None
    """[num_pairs] margins of the Bradley-Terry loss, 0 for a pair without one; None if no pair has one."""


class RewardTask(PairTask[ScalarModel, RewardTrainingConfig, PairBatch]):
    """Trains a model to score the chosen response of a pair above the rejected one."""

    role: ClassVar[str] = "reward"
    metric_group: ClassVar[str] = "reward_model"
    best_metric: str | None = "evaluation/pair_accuracy"
    best_is_lowest: bool = False

    @property
    def dropout(self) -> bool:
        """Whether the model trains with its own dropout."""
        return self.config.dropout

    def training_metrics(self, total: PairMeasures) -> dict[str, MetricValue]:
        return pair_metrics(self.metric_group, total.scores)

    def batches(self, pairs: Sequence[PreferencePair]) -> list[tuple[list[int], PairBatch]]:
        sequences = [pair_sequences(pair) for pair in pairs]
        lengths = [len(chosen) + len(rejected) for chosen, rejected in sequences]
        batches = []
        for indices in plan_own_share(lengths, token_budget=self.config.tokens_per_microbatch):
            if not indices:
                batches.append((indices, self._batch_of_nothing()))
                continue
            chosen, rejected = zip(*(sequences[i] for i in indices), strict=True)
            margins, row_margins = None, [pairs[i].margin for i in indices]
            if any(margin is not None for margin in row_margins):
                margins = torch.tensor([margin or 0.0 for margin in row_margins], device=self.model.device)
            packed = pack([*chosen, *rejected], device=self.model.device)
            scored = packed.last_indices
            if self.config.loss == "divergence_window":
                scored = torch.tensor(_divergence_indices(chosen, rejected), device=self.model.device)
            batch = PairBatch(packed=packed, num_pairs=len(indices), scored=scored, margins=margins)
            batches.append((indices, batch))
        return batches

    def _batch_of_nothing(self) -> PairBatch:
        nothing = pack_nothing(self.model.device)
        return PairBatch(packed=nothing.packed, num_pairs=0, scored=nothing.predictors, margins=None)

    def loss(self, batch: PairBatch, *, num_pairs: int) -> tuple[Tensor, PairMeasures]:
        scores = self.model.token_scores(batch.packed, batch.scored)
        if self.config.loss == "divergence_window":
            # Tokens before the divergence get score 0: the loss ignores them.
            scores = scores.new_zeros(batch.packed.num_tokens).index_copy(0, batch.scored, scores)
            chosen, rejected = scores[batch.packed.last_indices[: 2 * batch.num_pairs]].tensor_split(2)
            per_pair = divergence_window(*_token_scores(batch, scores))
        else:
            chosen, rejected = scores.tensor_split(2)
            per_pair = bradley_terry(chosen, rejected, margin=batch.margins, centring=self.config.score_centring)
        return per_pair.sum() / num_pairs, PairMeasures(scores=pair_scores(chosen.detach(), rejected.detach()))


def pair_sequences(pair: PreferencePair) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of the prompt with the chosen response, and of the prompt with the rejected one."""
    prompt = pair.prompt_token_ids
    return (*prompt, *pair.chosen_token_ids), (*prompt, *pair.rejected_token_ids)


def _divergence_indices(chosen: Sequence[Sequence[int]], rejected: Sequence[Sequence[int]]) -> list[int]:
    """Flat indices of the tokens from the first difference of a pair on, in the packing of PairBatch.

    Always includes the last token of each sequence, since one may be a prefix of the other.
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
    lengths = batch.packed.lengths[: 2 * batch.num_pairs]
    halves = lengths[: batch.num_pairs], lengths[batch.num_pairs :]
    cut = sum(halves[0])
    ids, scores = batch.packed.token_ids[: sum(lengths)], scores[: sum(lengths)]
    return (
        TokenScores(token_ids=ids[:cut], scores=scores[:cut], lengths=halves[0]),
        TokenScores(token_ids=ids[cut:], scores=scores[cut:], lengths=halves[1]),
    )
