"""Losses from preferences: of a reward model (Bradley-Terry), and of a language model (DPO, IPO, KTO).

N pairs, R answers. `chosen` and `rejected` belong to the two responses to one prompt. A log-ratio is the log-prob of a
whole answer, summed over its tokens, under the policy minus that under the reference, in nats.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from proximo.algorithms.masking import last_indices, select


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


def implicit_rewards(log_ratios: Float[Tensor, "*shape"], *, beta: float) -> Float[Tensor, "*shape"]:
    """beta log(pi / pi_ref), in the shape given: the reward that the policy is the best answer to, up to a constant of
    the prompt (arXiv:2305.18290, eq. 5)."""
    return beta * log_ratios


def dpo_loss(
    chosen_log_ratios: Float[Tensor, "pairs"],
    rejected_log_ratios: Float[Tensor, "pairs"],
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Float[Tensor, "pairs"]:
    """-(1 - eps) log sigmoid(x) - eps log sigmoid(-x) with x the difference of implicit rewards, [N] from [N].

    With eps = 0 it is the loss of arXiv:2305.18290, eq. 7. eps is the assumed fraction of pairs with swapped
    labels (conservative DPO, E. Mitchell, 2023, "A note on DPO with noisy preferences"): the loss is then
    lowest at x = log((1 - eps) / eps) and grows beyond; with eps = 0 it always falls with x.
    """
    gap = implicit_rewards(chosen_log_ratios, beta=beta) - implicit_rewards(rejected_log_ratios, beta=beta)
    return -(1 - label_smoothing) * logsigmoid(gap) - label_smoothing * logsigmoid(-gap)


def ipo_loss(
    chosen_log_ratios: Float[Tensor, "pairs"], rejected_log_ratios: Float[Tensor, "pairs"], *, beta: float
) -> Float[Tensor, "pairs"]:
    """(h - 1 / (2 beta))^2 with h the difference of log-ratios, [N] from [N] (IPO, arXiv:2310.12036, eq. 17).

    The gap is drawn to a fixed width; the loss of DPO widens it for as long as the pairs agree. Log-ratios are of
    whole answers, as in the paper. With means over tokens, as in TRL, beta has another meaning.
    """
    return (chosen_log_ratios - rejected_log_ratios - 1 / (2 * beta)).square()


def reference_point(mismatched_log_ratios: Float[Tensor, "responses"]) -> Float[Tensor, ""]:
    """z0 = max(0, mean log-ratio), in nats, from [R] log-ratios of answers to other prompts than their own.

    It estimates the KL divergence of the policy from the reference, from below, with answers of the data in place of
    the policy's own (arXiv:2402.01306, section 4.1). It carries no gradient, and a NaN among the log-ratios makes it
    NaN. Raises ValueError for no log-ratio.
    """
    if mismatched_log_ratios.numel() == 0:
        raise ValueError("a reference point needs at least one log-ratio")
    return mismatched_log_ratios.detach().mean().clamp(min=0)


def kto_loss(
    log_ratios: Float[Tensor, "responses"],
    desirable: Bool[Tensor, "responses"],
    *,
    beta: float,
    reference_point: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Tensor, "responses"]:
    """w (1 - sigmoid(x)), [R] from [R], with x = beta (log-ratio - z0) for desirable answers, else -x.

    The loss of arXiv:2402.01306, eq. 8; z0 is `reference_point`, in nats. The weights w are lambda_D and lambda_U. A
    loss lies between 0 and its weight. With z0 = 0 it is APO-zero for single answers, which TRL calls
    `apo_zero_unpaired`.
    """
    gains = beta * (log_ratios - reference_point)
    return torch.where(desirable, desirable_weight * torch.sigmoid(-gains), undesirable_weight * torch.sigmoid(gains))
