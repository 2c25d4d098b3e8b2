"""How much better than expected each token was: GAE with a value model, returns to go and group baselines without one.

Nothing here standardises over the batch (`masking.standardise` does), and nothing carries a gradient: advantages and
returns are constants to the losses.
"""

from collections.abc import Sequence
from math import comb

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from proximo.algorithms.discounted_scan import advantages_by_scan, goes_by_scan, returns_by_scan
from proximo.algorithms.flat_layout import (
    final_value_positions,
    segment_ids,
    segment_rows,
    segment_sum,
    token_positions,
    value_positions,
)


@torch.no_grad()
def gae(
    rewards: Float[Tensor, "tokens"],
    values: Float[Tensor, "states"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    *,
    bootstrap: Bool[Tensor, "responses"],
    gamma: float,
    lam: float | Float[Tensor, "responses"],
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), for all responses at once.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}

    t runs over the tokens in the mask. Tokens that a tool wrote between two turns are skipped without a discount.

    Args:
        rewards: [T] flat over the tokens of R responses.
        values: [T + R] V_t before each token, and one more per response after its last.
        mask: [T] bool, True where the policy wrote the token; nothing is read elsewhere.
        lengths: [R] tokens of each response.
        bootstrap: [R] bool, True where the value after the last token estimates a future that was cut off. False
            where the policy ended the answer, or where the limit is part of the task: that value is then 0.
        gamma: discount per token.
        lam: 1 trusts the rewards (no bias), 0 the values (little variance); one number, or [R] one per response.

    Returns:
        (advantages [T], returns [T] = advantages + values), both 0 outside the mask.

    Raises:
        ValueError: the values are not one more per response than the rewards.
    """
    if len(values) != len(rewards) + len(lengths):
        raise ValueError(
            f"gae needs one value per token and one more per response, {len(rewards)} + {len(lengths)}; got "
            f"{len(values)}: was the value after each last token left out?"
        )
    final_values = torch.where(bootstrap, values[final_value_positions(lengths, device=values.device)], 0)
    token_values = values[value_positions(lengths, device=values.device)]
    if goes_by_scan(rewards):
        options = {"final_values": final_values, "gamma": gamma, "lam": lam}
        advantages = advantages_by_scan(rewards, token_values, mask, lengths, **options)
    else:
        kept_lengths = segment_sum(mask.long(), lengths).tolist()
        deltas = _deltas(rewards[mask], token_values[mask], final_values, kept_lengths, gamma)
        advantages = deltas.new_zeros(len(rewards))
        advantages[mask] = _discounted_sums(deltas, kept_lengths, gamma * lam)
    return advantages, torch.where(mask, advantages + token_values, 0)


def _deltas(rewards: Tensor, values: Tensor, final_values: Tensor, lengths: Sequence[int], gamma: float) -> Tensor:
    """[T] r_t + gamma * V_{t+1} - V_t, with `final_values` [R] after each last token."""
    owners = segment_ids(lengths, device=values.device)
    counts = torch.tensor(lengths, dtype=torch.long, device=values.device)
    is_last = token_positions(lengths, device=values.device) + 1 == counts[owners]
    next_values = torch.where(is_last, final_values[owners], values.roll(-1))
    return rewards + gamma * next_values - values


def _discounted_sums(x: Tensor, lengths: Sequence[int], decay: float | Tensor) -> Tensor:
    """[T] y_t = x_t + decay * y_{t+1} within each response: one pass over time for all responses together.

    `decay` is one number, or [R].
    """
    columns = segment_rows(x, lengths).T.contiguous()
    times = columns.unbind(0)
    for now, later in zip(reversed(times[:-1]), reversed(times[1:]), strict=True):
        now.add_(later * decay)
    return columns[token_positions(lengths, device=x.device), segment_ids(lengths, device=x.device)]


def length_adaptive_lam(num_tokens: Shaped[Tensor, "responses"], *, alpha: float) -> Float[Tensor, "responses"]:
    """lambda = 1 - 1 / (alpha * tokens), at least 0 (VAPO, arXiv:2504.05118): [R] from [R].

    The powers of lambda then sum to about alpha * tokens: every response looks ahead over the same share of itself,
    however long it is. One of 1 / alpha tokens or fewer looks a single step ahead.
    """
    return (1 - 1 / (alpha * num_tokens)).clamp(min=0)


@torch.no_grad()
def returns_to_go(
    rewards: Float[Tensor, "tokens"], mask: Bool[Tensor, "tokens"], lengths: Sequence[int], *, gamma: float
) -> Float[Tensor, "tokens"]:
    """[T] G_t = r_t + gamma * G_{t+1} over the tokens in the mask, 0 outside: REINFORCE without a baseline.

    Standardised over the batch it is REINFORCE++ (arXiv:2501.03262). Arguments as in `gae`.
    """
    if goes_by_scan(rewards):
        return returns_by_scan(rewards, mask, lengths, gamma=gamma)
    to_go = rewards.new_zeros(len(rewards))
    to_go[mask] = _discounted_sums(rewards[mask], segment_sum(mask.long(), lengths).tolist(), gamma)
    return to_go


@torch.no_grad()
def discounted_returns(
    rewards: Float[Tensor, "tokens"], mask: Bool[Tensor, "tokens"], lengths: Sequence[int], *, gamma: float
) -> Float[Tensor, "responses"]:
    """[R] the discounted return of each response: G_0 of `returns_to_go`, 0 without a masked token."""
    to_go = returns_to_go(rewards, mask, lengths, gamma=gamma)
    return segment_sum(torch.where(_first_in_mask(mask, lengths), to_go, 0), lengths)


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


def broadcast_to_tokens(per_response: Shaped[Tensor, "responses"], lengths: Sequence[int]) -> Shaped[Tensor, "tokens"]:
    """[T] from [R]: every token of a response gets its response's number."""
    return per_response[segment_ids(lengths, device=per_response.device)]


def _group_sums(x: Tensor, group_ids: Tensor) -> Tensor:
    """[R]: for each response the sum of x over its group. Sorted first, so that the order of addition is fixed."""
    order = group_ids.argsort(stable=True)
    _, sizes = torch.unique_consecutive(group_ids[order], return_counts=True)
    sums = segment_sum(x[order], sizes.tolist()).repeat_interleave(sizes)
    return torch.empty_like(x).scatter(0, order, sums)


def _group_extremes(x: Tensor, index: Tensor, valid: Tensor, none: float, reduce: str) -> Tensor:
    """[R]: for each response the lowest or highest valid x of its group, numbered by `index`; `none` without any."""
    return torch.full_like(x, none).scatter_reduce(0, index, torch.where(valid, x, none), reduce)[index]


def _first_in_mask(mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T] bool: True at the first masked token of each response, if it has one."""
    counts = segment_sum(mask.long(), lengths)
    counts_before = counts.cumsum(0) - counts
    return mask & (mask.cumsum(0) == counts_before[segment_ids(lengths, device=mask.device)] + 1)
