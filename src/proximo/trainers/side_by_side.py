"""Whether policy and value model train at the same time. Not how: models/lanes.py."""

from proximo.config.ppo import PPOConfig
from proximo.models.lanes import has_lanes

BOTH_UPDATES = ("train_policy", "train_value")
"""The calls that may then run side by side."""


def trains_side_by_side(
    config: PPOConfig,
    *,
    device: str,
    shares_trunk: bool,
    compiled: bool = False,
    quantised: bool = False,
    own_optimizers: bool = False,
    num_threads: int | None = None,
) -> bool:
    """True where it is asked for, and nothing that both updates would touch stands against it.

    A shared trunk is one model. torch.compile and bases in few bits keep states that two threads would write. An
    optimizer that was brought may draw from torch's generator, in an order that would be another in each run. And who
    lets one step in the backward pass wants the memory more than the time.
    `num_threads`: None for torch's own.
    """
    in_backward = any(each and each.in_backward for each in (config.policy_optimizer, config.value_optimizer))
    alone = shares_trunk or compiled or quantised or own_optimizers or in_backward or not config.uses_critic
    return config.side_by_side and not alone and has_lanes(device, num_threads=num_threads)
