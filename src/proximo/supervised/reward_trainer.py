"""Reward model training on preference pairs: its task, and how it is built from a recipe."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from proximo.algorithms.preferences import TokenScores, bradley_terry, divergence_window
from proximo.data.preferences import PreferencePair
from proximo.errors import ConfigError
from proximo.metrics.values import MetricValue
from proximo.models.packing import Packed, pack, pack_nothing, plan_own_share
from proximo.models.scalar import HeadStart, ScalarModel
from proximo.run.make.models import build_scalar_model
from proximo.supervised.building import prepare_model, start, task_inputs
from proximo.supervised.pairs import (
    PairMeasures,
    PairTask,
    load_pairs,
    longest_pair,
    pair_metrics,
    pair_scores,
    unused_margins,
)
from proximo.supervised.reward_recipe import RewardRecipe, RewardTrainingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PairBatch:
    """A micro-batch of pairs, packed: all chosen sequences, then all rejected ones.

    What the two sequences of a pair begin with is computed once.
    """

    packed: Packed
    """Of no pair, one token that is not scored."""
    num_pairs: int
    scored: Tensor
    """Flat indices of the tokens that the loss reads: the last of each sequence, or with `divergence_window` all that
    the sequences of a pair do not share."""
    own_lengths: tuple[int, ...]
    """With `divergence_window` [2 num_pairs], the number of these tokens of each sequence; else empty."""
    margins: Tensor | None
    """[num_pairs] margins of the Bradley-Terry loss, 0 for a pair without one; None if no pair has one."""

    @property
    def tokens(self) -> Packed:
        """All tokens of the micro-batch."""
        return self.packed


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
        shared = [num_shared(*pair) for pair in sequences]
        lengths = [len(pair[0]) + len(pair[1]) - count for pair, count in zip(sequences, shared, strict=True)]
        batches = []
        for indices in plan_own_share(
            lengths,
            token_budget=self.config.tokens_per_microbatch,
            prefixes=[chosen[:count] for (chosen, _), count in zip(sequences, shared, strict=True)],
        ):
            if not indices:
                batches.append((indices, self._batch_of_nothing()))
                continue
            chosen, rejected = zip(*(sequences[i] for i in indices), strict=True)
            margins, row_margins = None, [pairs[i].margin for i in indices]
            if any(margin is not None for margin in row_margins):
                margins = torch.tensor([margin or 0.0 for margin in row_margins], device=self.model.device)
            counts = [shared[i] for i in indices] * 2
            packed = pack([*chosen, *rejected], shareable=counts, device=self.model.device)
            scored, own_lengths = packed.last_indices, ()
            if self.config.loss == "divergence_window":
                own_lengths = tuple(len(each) - n for each, n in zip([*chosen, *rejected], counts, strict=True))
                runs = zip(scored.tolist(), own_lengths, strict=True)
                scored = torch.cat([torch.arange(last + 1 - count, last + 1) for last, count in runs])
                scored = scored.to(self.model.device)
            batch = PairBatch(
                packed=packed, num_pairs=len(indices), scored=scored, own_lengths=own_lengths, margins=margins
            )
            batches.append((indices, batch))
        return batches

    def _batch_of_nothing(self) -> PairBatch:
        nothing = pack_nothing(self.model.device)
        return PairBatch(packed=nothing.packed, num_pairs=0, scored=nothing.predictors, own_lengths=(), margins=None)

    def loss(self, batch: PairBatch, *, num_pairs: int) -> tuple[Tensor, PairMeasures]:
        scores = self.model.token_scores(batch.packed, batch.scored)
        if self.config.loss == "divergence_window":
            ends = torch.tensor(list(accumulate(batch.own_lengths)), dtype=torch.long, device=scores.device)
            chosen, rejected = scores[ends - 1].tensor_split(2)
            per_pair = divergence_window(*_token_scores(batch, scores))
        else:
            chosen, rejected = scores.tensor_split(2)
            per_pair = bradley_terry(chosen, rejected, margin=batch.margins, centring=self.config.score_centring)
        return per_pair.sum() / num_pairs, PairMeasures(scores=pair_scores(chosen.detach(), rejected.detach()))


def pair_sequences(pair: PreferencePair) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of the prompt with the chosen response, and of the prompt with the rejected one."""
    prompt = pair.prompt_token_ids
    return (*prompt, *pair.chosen_token_ids), (*prompt, *pair.rejected_token_ids)


def num_shared(chosen: Sequence[int], rejected: Sequence[int]) -> int:
    """How many first tokens the sequences of a pair share. Each keeps at least one token of its own."""
    longest = min(len(chosen), len(rejected)) - 1
    pairs = enumerate(zip(chosen[:longest], rejected[:longest], strict=True))
    return next((i for i, (one, other) in pairs if one != other), longest)


def _token_scores(batch: PairBatch, scores: Tensor) -> tuple[TokenScores, TokenScores]:
    """Of the tokens that the sequences of a pair do not share: both begin at the same position."""
    halves = batch.own_lengths[: batch.num_pairs], batch.own_lengths[batch.num_pairs :]
    cut = sum(halves[0])
    ids = batch.packed.token_ids[batch.scored]
    return (
        TokenScores(token_ids=ids[:cut], scores=scores[:cut], lengths=halves[0]),
        TokenScores(token_ids=ids[cut:], scores=scores[cut:], lengths=halves[1]),
    )


def build_task(recipe: RewardRecipe) -> RewardTask:
    """Load data, then the model, so that a bad data file fails before any weights are loaded."""
    if recipe.model.init_from != "path":
        raise ConfigError(
            f"model.init_from is {recipe.model.init_from}, but a reward model starts from a path or a config"
        )
    begun = start(recipe, {"reward": recipe.model})
    pairs = load_pairs(recipe.data, begun, learned="last")
    model = build_scalar_model(
        recipe.model, begun.tokenizer, fresh_head=HeadStart.NORMAL, device_spec=begun.device_spec
    )
    fingerprint = prepare_model(
        recipe, model, begun, role="reward", longest=longest_pair(pairs), dropout=recipe.reward.dropout
    )
    notes: list[str] = []
    if recipe.reward.loss != "bradley_terry":
        notes = unused_margins(pairs.training, "only loss bradley_terry has a place for them")
    return RewardTask(task_inputs(recipe, model, begun, pairs, fingerprint=fingerprint, rows="pairs", notes=notes))
