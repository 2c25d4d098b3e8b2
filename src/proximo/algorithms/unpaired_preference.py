"""Kahneman-Tversky optimisation (KTO): the loss of a language model from single answers, labelled desirable or not.

R answers. A log-ratio is the log-prob of a whole answer, summed over its tokens, under the policy minus that under the
reference, in nats.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


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
