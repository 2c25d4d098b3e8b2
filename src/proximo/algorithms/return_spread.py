"""Steps whose returns are all (nearly) one number: what a critic says of them is its own noise. Pure.

On a solved task every response earns the same, and advantages are what the critic errs by. Standardising blows that up
to updates of full size; nor would smaller advantages help, since AdamW divides by the size of recent gradients and so
undoes any factor that lasts (docs/ppo.md, "Steps with nearly equal returns").
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
    """How much the returns of a step differ, beside those of the whole run."""

    deviation: float
    """Standard deviation of the step's returns: what each response earned in all, KL included, before whitening."""
    seen: RunningMoments
    """Of all returns of the run so far, this step's included."""
    is_flat: bool
    """The step tells the policy nothing: the deviation is at most the share `least` of that of the run."""


def return_spread(
    rewards: Float[Tensor, "tokens"],
    mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    *,
    gamma: float,
    least: float | None,
    seen: RunningMoments,
) -> ReturnSpread:
    """From the rewards [T] of a step, read on the mask [T] alone, and the returns of the steps before.

    A step of fewer than two responses that count has no spread, and is not flat, nor is any where `least` is None.
    Where the returns of a whole run had no spread so far, every step of it is.
    """
    wrote = [bool(part.any()) for part in mask.split(list(lengths))]
    returns = discounted_returns(rewards.double(), mask, lengths, gamma=gamma)[torch.tensor(wrote)]
    seen = update_moments(seen, returns)
    deviation = returns.std(correction=0).item() if len(returns) else 0.0
    is_flat = False
    if least is not None and len(returns) > 1:
        is_flat = seen.deviation is None or deviation <= least * seen.deviation
    return ReturnSpread(deviation=deviation, seen=seen, is_flat=is_flat)
