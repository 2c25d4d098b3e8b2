"""Discounted sums within responses as a scan, for accelerators: log2(longest) rounds of a few operators.

There is no loop over time and no wait of the host. Each round joins tokens at twice the distance of the round before.
So sums are added as a tree, and the last bits differ from those of a loop. They do not depend on the other responses.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from proximo.algorithms.masking import segment_ids


def scan_back(
    x: Float[Tensor, "tokens"], decay: Float[Tensor, "tokens"], lengths: Sequence[int]
) -> Float[Tensor, "tokens"]:
    """[T] y_t = x_t + decay_t * y_{t+1} within each response; x and decay [T]."""
    owners, shift = segment_ids(lengths, device=x.device), 1
    while shift < max(lengths, default=0):
        same = owners[shift:] == owners[:-shift]
        later, further = (torch.where(same, tensor[shift:], 0) for tensor in (x, decay))
        x = torch.cat([x[:-shift] + decay[:-shift] * later, x[-shift:]])
        decay = torch.cat([decay[:-shift] * further, decay[-shift:]])
        shift *= 2
    return x


def advantages_by_scan(
    rewards: Float[Tensor, "tokens"],
    values: Float[Tensor, "tokens"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    *,
    final_values: Float[Tensor, "responses"],
    gamma: float,
    lam: float | Float[Tensor, "responses"],
) -> Float[Tensor, "tokens"]:
    """[T] the advantages of `advantages.gae`, 0 outside the mask. values [T] before each token, `final_values` [R]."""
    if len(rewards) == 0:
        return torch.zeros_like(rewards)
    owners = segment_ids(lengths, device=rewards.device)
    following, is_inside = _next_in_mask(mask, owners)
    next_values = torch.where(is_inside, values[following], final_values[owners])
    deltas = torch.where(mask, rewards + gamma * next_values - values, 0)
    decay = torch.ones_like(deltas)  # tokens between two tokens of the mask are not discounted
    if isinstance(lam, Tensor):
        decay = torch.where(mask, gamma * lam[owners].to(decay), decay)
    else:
        decay = decay.masked_fill(mask, gamma * lam)
    return torch.where(mask, scan_back(deltas, decay, lengths), 0)


def returns_by_scan(
    rewards: Float[Tensor, "tokens"], mask: Bool[Tensor, "tokens"], lengths: Sequence[int], *, gamma: float
) -> Float[Tensor, "tokens"]:
    """[T] the returns of `advantages.returns_to_go`, 0 outside the mask."""
    decay = torch.ones_like(rewards).masked_fill(mask, gamma)
    return torch.where(mask, scan_back(torch.where(mask, rewards, 0), decay, lengths), 0)


def _next_in_mask(mask: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
    """[T] the index of the next token in the mask, and [T] bool: whether it belongs to the same response."""
    num_tokens = len(mask)
    places = torch.where(mask, torch.arange(num_tokens, device=mask.device), num_tokens)
    first_from = places.flip(0).cummin(0).values.flip(0)
    following = torch.cat([first_from[1:], first_from.new_full((1,), num_tokens)])
    is_there, at_most = following < num_tokens, following.clamp(max=num_tokens - 1)
    return at_most, is_there & (owners[at_most] == owners)
