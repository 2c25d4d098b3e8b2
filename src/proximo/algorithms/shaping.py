"""From one score per response to one reward per token. Not advantages: see advantages.

Shapes: T tokens of R responses, flat; `lengths` gives the tokens of each response.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from proximo.algorithms.segments import segment_ids, segment_sum


def shape_rewards(
    kl_per_token: Tensor, scores: Tensor, mask: Tensor, lengths: Sequence[int], *, kl_coefficient: float
) -> Tensor:
    """r_t = -kl_coefficient * kl_t, plus the score, once, at the last token that the policy wrote (arXiv:1909.08593).

    Args:
        kl_per_token: [T] nats, any of `proximo.algorithms.kl`; zeros in a run without KL.
        scores: [R] one per response; unread where a response has no token in the mask.
        mask: [T] bool, True where the policy wrote the token; rewards are 0 elsewhere.
        lengths: [R] tokens of each response.
        kl_coefficient: reward lost per nat.

    Returns:
        [T] in the dtype of `kl_per_token`. A response whose last tokens a tool wrote has its score before them, where
        an action of the policy earns it.
    """
    ends = _last_in_mask(mask, lengths)
    score_at_token = scores.to(kl_per_token.dtype)[segment_ids(lengths, device=scores.device)]
    penalty = torch.where(mask, kl_per_token, 0) * kl_coefficient
    return torch.where(ends, score_at_token, 0) - penalty


def clip_scores(scores: Tensor, limit: float) -> Tensor:
    """Scores cut to [-limit, limit]; shape kept. A score that is not a number stays so."""
    return scores.clamp(-limit, limit)


def _last_in_mask(mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T] bool: True at the last masked token of each response, if it has one."""
    counts_at_end = segment_sum(mask.long(), lengths).cumsum(0)
    return mask & (mask.cumsum(0) == counts_at_end[segment_ids(lengths, device=mask.device)])
