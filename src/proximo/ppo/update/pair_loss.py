"""The loss over pairs of responses to one prompt: online DPO and IPO."""

from collections.abc import Callable

import torch
from torch import Tensor

from proximo.algorithms.masking import segment_sum
from proximo.algorithms.preferences import implicit_rewards
from proximo.ppo.update.microbatch import Microbatch


def pair_loss(
    logprobs: Tensor, batch: Microbatch, *, formula: Callable[..., Tensor], beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the mean over the update's pairs, a scalar, and the sums that the metrics need.

    `formula`: the loss of pairs from the log-ratios of the better and the worse response, [N] each, and `beta`.

    `logprobs`: [T] under the policy, 0 outside the mask. Responses 2 i and 2 i + 1 of the micro-batch are a pair; the
    one with a positive advantage is the better one.
    """
    lengths, columns = batch.packed.response_lengths, batch.columns
    log_ratios = segment_sum(torch.where(batch.mask, logprobs - columns["reference_logprobs"], 0), lengths).view(-1, 2)
    is_first = segment_sum(torch.where(batch.mask, columns["advantages"], 0), lengths).view(-1, 2)[:, 0] > 0
    first, second = log_ratios.unbind(1)
    chosen, rejected = torch.where(is_first, first, second), torch.where(is_first, second, first)
    loss = formula(chosen, rejected, beta=beta).sum() / (batch.num_update_responses / 2)
    with torch.no_grad():
        rewards = implicit_rewards(torch.stack([chosen, rejected]), beta=beta)
        gaps = rewards[0] - rewards[1]
        sums = {
            "pairs": gaps.new_tensor(len(gaps)),
            "accuracy": (gaps > 0).to(gaps.dtype).sum() + (gaps == 0).to(gaps.dtype).sum() / 2,
            "margin": gaps.sum(),
            "reward_chosen": rewards[0].sum(),
            "reward_rejected": rewards[1].sum(),
        }
    return loss, sums
