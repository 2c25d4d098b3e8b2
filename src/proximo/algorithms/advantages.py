"""How much better than expected each token was: GAE with a value model, group baselines without one.

Nothing here standardises over the batch (`masking.standardise` does), and nothing carries a gradient: advantages and
returns are constants to the losses.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from proximo.algorithms.segments import (
    final_value_positions,
    segment_ids,
    segment_rows,
    segment_sum,
    token_positions,
    value_positions,
)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    *,
    bootstrap: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), for all responses at once.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}

    t runs over the tokens in the mask: what a tool wrote between two turns of the policy is skipped, not discounted.

    Args:
        rewards: [T] flat over the tokens of R responses.
        values: [T + R] V_t before each token, and one more per response after its last.
        mask: [T] bool, True where the policy wrote the token; nothing is read elsewhere.
        lengths: [R] tokens of each response.
        bootstrap: [R] bool, True where the value after the last token stands for a future that was cut off. False
            where the policy ended the answer, and where the limit is part of the task: that value is then 0.
        gamma: discount per token.
        lam: 1 trusts the rewards (no bias), 0 the values (little variance).

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


def _discounted_sums(x: Tensor, lengths: Sequence[int], decay: float) -> Tensor:
    """[T] y_t = x_t + decay * y_{t+1} within each response: one pass over time, all responses side by side."""
    columns = segment_rows(x, lengths).T.contiguous()
    times = columns.unbind(0)
    for now, later in zip(reversed(times[:-1]), reversed(times[1:]), strict=True):
        now.add_(later * decay)
    return columns[token_positions(lengths, device=x.device), segment_ids(lengths, device=x.device)]


@torch.no_grad()
def group_centred(scores: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """score - mean of its group (Dr. GRPO, arXiv:2503.20783): [R] from [R].

    Args:
        scores: [R] one per response.
        group_ids: [R] integers, equal for the responses to one prompt; in any order.
        valid: [R] bool; the others have no part in their group's mean, and get 0.

    Returns:
        [R], exactly 0 where all valid scores of a group are equal, and so in a group of one.
    """
    _, index = torch.unique(group_ids, return_inverse=True)
    lowest = torch.full_like(scores, torch.inf).scatter_reduce(0, index, torch.where(valid, scores, torch.inf), "amin")
    # Counted from the lowest score, equal scores are exact zeros, whatever their mean rounds to.
    offsets = torch.where(valid, scores - lowest[index], 0)
    counts = _group_sums(valid.to(scores.dtype), group_ids).clamp(min=1)
    return torch.where(valid, offsets - _group_sums(offsets, group_ids) / counts, 0)


@torch.no_grad()
def group_standardised(
    scores: Tensor, group_ids: Tensor, valid: Tensor, *, correction: int = 1, epsilon: float = 1e-4
) -> Tensor:
    """(score - mean) / (standard deviation + epsilon) within its group (GRPO, arXiv:2402.03300): [R] from [R].

    Arguments as in `group_centred`. `correction` 1 is the unbiased variance, 0 the biased one; `epsilon`, above 0,
    stands beside the deviation and not under the root. Exactly 0 where all valid scores of a group are equal.
    """
    centred = group_centred(scores, group_ids, valid)
    counts = _group_sums(valid.to(scores.dtype), group_ids)
    variances = _group_sums(centred.square(), group_ids) / (counts - correction).clamp(min=1)
    return centred / (variances.sqrt() + epsilon)


def broadcast_to_tokens(per_response: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T] from [R]: every token of a response gets its response's number."""
    return per_response[segment_ids(lengths, device=per_response.device)]


def _group_sums(x: Tensor, group_ids: Tensor) -> Tensor:
    """[R]: for each response the sum of x over its group. Sorted first, so that the order of addition is fixed."""
    order = group_ids.argsort(stable=True)
    _, sizes = torch.unique_consecutive(group_ids[order], return_counts=True)
    sums = segment_sum(x[order], sizes.tolist()).repeat_interleave(sizes)
    return torch.empty_like(x).scatter(0, order, sums)
