"""A model that follows another one: averages of the policy, and references that are refreshed. Not when they move."""

import torch
from torch import nn


@torch.no_grad()
def follow(follower: nn.Module, leader: nn.Module, *, decay: float) -> None:
    """follower <- decay * follower + (1 - decay) * leader, parameter by parameter, in place; 0 copies, bit for bit.

    Buffers are copied. Both have the same architecture; a parameter that is tied to another one moves once.
    """
    leading = dict(leader.named_parameters())
    for name, parameter in follower.named_parameters():
        if decay == 0:
            parameter.copy_(leading[name])
        else:
            parameter.lerp_(leading[name].to(parameter.dtype), 1 - decay)
    buffers = dict(leader.named_buffers())
    for name, buffer in follower.named_buffers():
        buffer.copy_(buffers[name])
