"""Losses of a reward model from preference pairs, one number per pair.

N pairs. `chosen` and `rejected` are the scores of the two responses to one prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from proximo.algorithms.flat_layout import last_indices
from proximo.algorithms.masking import select


def bradley_terry(
    chosen: Float[Tensor, "pairs"],
    rejected: Float[Tensor, "pairs"],
    *,
    margin: Float[Tensor, "pairs"] | None = None,
    centring: float = 0.0,
) -> Float[Tensor, "pairs"]:
    """-log sigmoid(chosen - rejected - margin) + centring (chosen + rejected)^2, [N] from [N].

    `margin` [N] asks for a wider gap where annotators were surer (arXiv:2307.09288, eq. 2). `centring` pulls the scores
    of a pair towards a sum of 0, which their difference leaves open (arXiv:2312.09244).
    """
    gap = chosen - rejected if margin is None else chosen - rejected - margin
    return -logsigmoid(gap) + centring * (chosen + rejected).square()


def pair_accuracy(chosen: Float[Tensor, "pairs"], rejected: Float[Tensor, "pairs"]) -> Float[Tensor, "pairs"]:
    """1 where the chosen response scores higher, 1/2 for a tie, else 0: [N] from [N], to be summed and counted."""
    return (chosen > rejected).to(chosen.dtype) + 0.5 * (chosen == rejected).to(chosen.dtype)


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """A score after every token of N sequences, flat: the prompt and the response, or the response alone."""

    token_ids: Int[Tensor, "tokens"]
    scores: Float[Tensor, "tokens"]
    lengths: Sequence[int]
    """Tokens of each of the N sequences, at least 1."""


def divergence_window(chosen: TokenScores, rejected: TokenScores) -> Float[Tensor, "pairs"]:
    """The mean of -log sigmoid(chosen_t - rejected_t) from the first token that differs to the end: [N].

    The pairwise loss of DeepSpeed-Chat's reward models, which scores every token and not only the last. Here the
    window ends with the longer sequence, and a sequence that has ended keeps its last score. So no padding is read,
    and the two final scores, which PPO will use, are always compared. Two equal sequences compare only their final
    scores (log 2).

    Raises:
        ValueError: a sequence is empty.
    """
    width = max(max(chosen.lengths, default=0), max(rejected.lengths, default=0))
    chosen_ids, chosen_scores, chosen_alive = _held(chosen, width)
    rejected_ids, rejected_scores, rejected_alive = _held(rejected, width)
    differs = (chosen_ids != rejected_ids) | (chosen_alive != rejected_alive)
    alive = chosen_alive | rejected_alive
    final = alive & (alive.cumsum(1) == alive.sum(1, keepdim=True))
    window = alive & (final | (differs.cumsum(1) > 0))
    chosen_scores, rejected_scores = select(window, chosen_scores, rejected_scores)
    losses = torch.where(window, -logsigmoid(chosen_scores - rejected_scores), 0)
    return losses.sum(1) / window.sum(1)


def _held(sequences: TokenScores, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """([N, width] token ids, scores, whether the sequence still runs). After its end the last entry is repeated."""
    device = sequences.scores.device
    last = last_indices(sequences.lengths, device=device)
    lengths = torch.tensor(sequences.lengths, dtype=torch.long, device=device)
    positions = torch.arange(width, device=device)
    index = torch.minimum((last - lengths + 1)[:, None] + positions, last[:, None])
    return sequences.token_ids[index], sequences.scores[index], positions < lengths[:, None]
