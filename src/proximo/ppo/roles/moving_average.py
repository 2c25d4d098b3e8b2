"""The moving average of the policy, and the update of a model that follows another."""

import torch
from torch import nn

from proximo.config.ppo.options import PPOConfig
from proximo.models.language import LanguageModel
from proximo.models.scalar import ScalarModel
from proximo.ppo.roles.worker import RoleWorker
from proximo.rollout.engine import Engine


class AverageWorker(RoleWorker[LanguageModel]):
    """The moving average of the policy. `evaluate_average` evaluates it instead of the policy."""

    role = "average"

    def __init__(self, model: LanguageModel, config: PPOConfig, *, engine: Engine) -> None:
        """`engine`: samples from the average in evaluations."""
        super().__init__(model)
        self.decay = config.average_decay or 0.0
        self.engine = engine

    @property
    def saved_models(self) -> dict[str, LanguageModel | ScalarModel]:
        return {self.role: self.model}

    def move(self, policy: RoleWorker[LanguageModel]) -> None:
        """Move the average towards the policy by `average_decay`."""
        follow(self.model.model, policy.model.model, decay=self.decay)


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
            parameter.lerp_(leading[name].to(parameter), 1 - decay)
    buffers = dict(leader.named_buffers())
    for name, buffer in follower.named_buffers():
        buffer.copy_(buffers[name])
