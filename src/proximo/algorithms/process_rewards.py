"""Process rewards: the loss of a model that judges steps, and aggregates of the step probabilities of a solution.

S steps. A step's score is the log-odds that the step is right (arXiv:2211.14275, arXiv:2305.20050).
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

Aggregate = Literal["min", "product", "last", "mean"]
"""How the probabilities of a solution's steps are combined into one number."""


def step_loss(scores: Float[Tensor, "steps"], labels: Float[Tensor, "steps"]) -> Float[Tensor, "steps"]:
    """-y log sigmoid(s) - (1 - y) log(1 - sigmoid(s)) in nats: [S] from [S] scores s and labels y in [0, 1].

    A label between 0 and 1 is an estimate of the probability, such as the fraction of continuations from the step that
    reach the answer (arXiv:2312.08935, eq. 2).
    """
    return binary_cross_entropy_with_logits(scores, labels, reduction="none")


def running_aggregate(probabilities: Float[Tensor, "steps"], how: Aggregate) -> Float[Tensor, "steps"]:
    """[S] the aggregate of the first k steps of one solution, for k = 1 to S; the last entry is that of the solution.

    `min` and `product` (arXiv:2305.20050, appendix F.2) never rise with a further step: `product` is the probability
    that all steps are right, if they are independent. `last` takes the latest step alone, `mean` the average.
    """
    match how:
        case "min":
            return probabilities.cummin(0).values
        case "product":
            return probabilities.cumprod(0)
        case "last":
            return probabilities
        case "mean":
            counts = torch.arange(1, len(probabilities) + 1, dtype=probabilities.dtype, device=probabilities.device)
            return probabilities.cumsum(0) / counts


def step_deltas(aggregates: Float[Tensor, "steps"]) -> Float[Tensor, "steps"]:
    """[S] what each step adds to the aggregate of the steps before it; the first adds its own, from 0.

    They sum to the aggregate of the solution, so that a further step pays only if it raises that. This is shaping by a
    potential that is 0 before the first step (Ng, Harada and Russell 1999): with gamma = 1 the expected policy gradient
    is that of the aggregate of the solution on the last token.
    """
    return torch.diff(aggregates, prepend=aggregates.new_zeros(1))
