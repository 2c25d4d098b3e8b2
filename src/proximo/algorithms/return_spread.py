"""Detects steps with nearly constant returns, whose advantages would be critic noise.

On a solved task all responses earn the same, so advantages are the errors of the critic. Standardising enlarges them
to updates of full size. Smaller advantages would not help: AdamW divides by the size of recent gradients, which cancels
any lasting factor (docs/ppo.md, "Steps with nearly equal returns").
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from proximo.algorithms.advantages import discounted_returns
from proximo.algorithms.score_transforms import RunningMoments, update_moments


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnSpread:
    """The spread of the returns of a step, and that of the whole run."""

    deviation: float
    """Standard deviation of the step's returns: the total reward of each response, with KL, before whitening."""
    seen: RunningMoments
    """Of all returns of the run so far, this step's included."""
    is_flat: bool
    """True if the step has no signal: its deviation is at most the fraction `least` of the run's."""


def return_spread(
    rewards: Float[Tensor, "tokens"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    *,
    gamma: float,
    least: float | None,
    seen: RunningMoments,
) -> ReturnSpread:
    """The spread from the rewards [T] of a step, read only inside the mask [T], and the returns of earlier steps.

    A step with fewer than two counted responses has no spread and is not flat. No step is flat if `least` is None.
    While the returns of the whole run have no spread, every step is flat.
    """
    wrote = [bool(part.any()) for part in mask.split(list(lengths))]
    returns = discounted_returns(rewards.double(), mask, lengths, gamma=gamma)[torch.tensor(wrote)]
    seen = update_moments(seen, returns)
    deviation = returns.std(correction=0).item() if len(returns) else 0.0
    is_flat = False
    if least is not None and len(returns) > 1:
        is_flat = seen.deviation is None or deviation <= least * seen.deviation
    return ReturnSpread(deviation=deviation, seen=seen, is_flat=is_flat)
