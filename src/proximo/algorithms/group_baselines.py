"""Advantages without a value model, from the comparison of the responses to one prompt."""

from collections.abc import Sequence
from math import comb

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from proximo.algorithms.advantages import discounted_returns, returns_to_go
from proximo.algorithms.masking import broadcast_to_tokens, segment_sum


@torch.no_grad()
def group_returns_to_go(
    rewards: Float[Tensor, "tokens"],
    group_ids: Int[Tensor, "responses"],
    valid: Bool[Tensor, "responses"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    *,
    gamma: float,
) -> Float[Tensor, "tokens"]:
    """[T] G_t - the mean of G at the first token over the valid responses of the group, 0 outside the mask.

    Standardised over the batch it is REINFORCE++ with a baseline (arXiv:2501.03262). Arguments as in `returns_to_go`
    and `group_centred`. Where only a last token is rewarded this is `group_centred`, exact zeros included; rewards on
    every token (the KL) count from their token on.
    """
    to_go = returns_to_go(rewards, mask, lengths, gamma=gamma)
    starts = discounted_returns(rewards, mask, lengths, gamma=gamma)
    centred = group_centred(starts, group_ids, valid)
    since_start = to_go - broadcast_to_tokens(starts, lengths)
    return torch.where(mask, since_start + broadcast_to_tokens(centred, lengths), 0)


@torch.no_grad()
def group_centred(
    scores: Float[Tensor, "responses"], group_ids: Int[Tensor, "responses"], valid: Bool[Tensor, "responses"]
) -> Float[Tensor, "responses"]:
    """score - mean of its group (Dr. GRPO, arXiv:2503.20783): [R] from [R].

    Args:
        scores: [R] one per response.
        group_ids: [R] integers, equal for the responses to one prompt; in any order.
        valid: [R] bool; other responses do not count in their group's mean, and get 0.

    Returns:
        [R], exactly 0 where all valid scores of a group are equal, and so in a group of one.
    """
    _, index = torch.unique(group_ids, return_inverse=True)
    lowest = _group_extremes(scores, index, valid, torch.inf, "amin")
    # Counted from the lowest score, equal scores are exact zeros, whatever their mean rounds to.
    offsets = torch.where(valid, scores - lowest, 0)
    counts = _group_sums(valid.to(scores.dtype), group_ids).clamp(min=1)
    return torch.where(valid, offsets - _group_sums(offsets, group_ids) / counts, 0)


@torch.no_grad()
def group_standardised(
    scores: Float[Tensor, "responses"],
    group_ids: Int[Tensor, "responses"],
    valid: Bool[Tensor, "responses"],
    *,
    correction: int = 1,
    epsilon: float = 1e-4,
) -> Float[Tensor, "responses"]:
    """(score - mean) / (standard deviation + epsilon) within its group (GRPO, arXiv:2402.03300): [R] from [R].

    Arguments as in `group_centred`. `correction` 1 is the unbiased variance, 0 the biased one; `epsilon`, above 0,
    is added to the deviation, outside the root. Exactly 0 where all valid scores of a group are equal.
    """
    centred = group_centred(scores, group_ids, valid)
    counts = _group_sums(valid.to(scores.dtype), group_ids)
    variances = _group_sums(centred.square(), group_ids) / (counts - correction).clamp(min=1)
    return centred / (variances.sqrt() + epsilon)


@torch.no_grad()
def leave_one_out(
    scores: Float[Tensor, "responses"], group_ids: Int[Tensor, "responses"], valid: Bool[Tensor, "responses"]
) -> Float[Tensor, "responses"]:
    """score - mean of the OTHER valid scores of its group (RLOO, arXiv:2402.14740): [R] from [R].

    It equals n / (n - 1) times `group_centred`, with n valid scores in the group. The baseline leaves out the
    response's own score and is therefore unbiased. Exactly 0 where all valid scores of a group are equal, and in a
    group of one. Arguments as in `group_centred`.
    """
    counts = _group_sums(valid.to(scores.dtype), group_ids)
    return group_centred(scores, group_ids, valid) * counts / (counts - 1).clamp(min=1)


@torch.no_grad()
def length_weighted(
    scores: Float[Tensor, "responses"],
    group_ids: Int[Tensor, "responses"],
    valid: Bool[Tensor, "responses"],
    num_tokens: Shaped[Tensor, "responses"],
) -> Float[Tensor, "responses"]:
    """score - b, b = sum(tokens * score) / sum(tokens) over its group (OPO, arXiv:2505.23585): [R] from [R].

    The baseline of least variance where the squared gradient of a response's log-prob grows with its `num_tokens` [R].
    Other arguments as in `group_centred`, which it is where all are of one length. Exactly 0 where all valid scores of
    a group are equal.
    """
    offsets = group_centred(scores, group_ids, valid)
    weights = torch.where(valid, num_tokens, 0).to(scores.dtype)
    total = _group_sums(weights, group_ids).clamp(min=1)
    return torch.where(valid, offsets - _group_sums(weights * offsets, group_ids) / total, 0)


@torch.no_grad()
def pass_at_k(
    scores: Float[Tensor, "responses"], group_ids: Int[Tensor, "responses"], valid: Bool[Tensor, "responses"], *, k: int
) -> Float[Tensor, "responses"]:
    """k times the gain of a response over the best of k - 1 others: k E[max(score - max of others, 0)], [R] from [R].

    The mean runs over all sets of k - 1 other valid responses of the group, by their ranks. The mean over a group of
    advantage times gradient of the log-prob is then unbiased for the gradient of E[best score of k samples] (PKPO with
    the baseline that leaves one out, arXiv:2505.15201); of pass@k, where scores are 0 and 1. Never
    negative. 0 in a group of fewer than k valid responses. Arguments as in `group_centred`; `k` is at least 2.
    """
    result = torch.zeros_like(scores)
    for group in torch.unique(group_ids[valid]):
        members = (valid & (group_ids == group)).nonzero().flatten()
        result[members] = _added_to_the_best(scores[members], k)
    return result


def _added_to_the_best(scores: Tensor, k: int) -> Tensor:
    """[n] from the scores of one group; rank j of n, ascending, is the best of k - 1 others in C(j, k - 2) sets."""
    n = len(scores)
    if n < k:
        return torch.zeros_like(scores)
    ascending, order = scores.double().sort(stable=True)
    # A response above rank j is in no set whose best is rank j, so all C(j, k - 2) such sets consist of others.
    sets = torch.tensor([comb(j, k - 2) for j in range(n)], dtype=torch.float64, device=scores.device)
    gaps = (ascending[:, None] - ascending[None, :]).clamp(min=0)
    added = k * (gaps * sets).sum(1) / comb(n - 1, k - 1)
    return torch.empty_like(scores).scatter(0, order, added.to(scores.dtype))


@torch.no_grad()
def zero_variance_groups(
    outcomes: Float[Tensor, "responses"], group_ids: Int[Tensor, "responses"], valid: Bool[Tensor, "responses"]
) -> Bool[Tensor, "responses"]:
    """[R] bool: True where all valid outcomes [R] of the response's group are one number, or there is at most one.

    Such a group does not show which response is better. Arguments as in `group_centred`; outcomes that are not valid
    may have any value.
    """
    _, index = torch.unique(group_ids, return_inverse=True)
    lowest = _group_extremes(outcomes, index, valid, torch.inf, "amin")
    highest = _group_extremes(outcomes, index, valid, -torch.inf, "amax")
    return lowest >= highest


@torch.no_grad()
def standardised_in_groups(
    advantages: Float[Tensor, "tokens"],
    group_ids: Int[Tensor, "responses"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    *,
    correction: int = 0,
    epsilon: float = 1e-8,
) -> Float[Tensor, "tokens"]:
    """`masking.standardise` over the tokens of each group by itself: [T] from [T], 0 outside the mask.

    Longer responses weigh more in their group. A group whose tokens all have one advantage gets 0. `group_ids` [R] as
    in `group_centred`, `mask` [T] and `lengths` [R] as in `gae`. Source: the group normalisation of AReaL.
    """

    def group_sum(x: Tensor) -> Tensor:
        """[T]: at each token the sum over its group."""
        return broadcast_to_tokens(_group_sums(segment_sum(torch.where(mask, x, 0), lengths), group_ids), lengths)

    counts = group_sum(torch.ones_like(advantages)).clamp(min=1)
    deviations = advantages
    for _ in range(2):  # the rounding of a large mean would otherwise be blown up where all entries are equal
        deviations = torch.where(mask, deviations - group_sum(deviations) / counts, 0)
    variance = group_sum(deviations.square()) / (counts - correction).clamp(min=1)
    return deviations * torch.rsqrt(variance + epsilon)


def _group_sums(x: Tensor, group_ids: Tensor) -> Tensor:
    """[R]: for each response the sum of x over its group. Sorted first, so that the order of addition is fixed."""
    order = group_ids.argsort(stable=True)
    _, sizes = torch.unique_consecutive(group_ids[order], return_counts=True)
    sums = segment_sum(x[order], sizes.tolist()).repeat_interleave(sizes)
    return torch.empty_like(x).scatter(0, order, sums)


def _group_extremes(x: Tensor, index: Tensor, valid: Tensor, none: float, reduce: str) -> Tensor:
    """[R]: for each response the lowest or highest valid x of its group, numbered by `index`; `none` without any."""
    return torch.full_like(x, none).scatter_reduce(0, index, torch.where(valid, x, none), reduce)[index]
