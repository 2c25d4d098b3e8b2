"""Who is who in a PPO run: the models of the roles made from what was brought, and those that follow the policy."""

from dataclasses import replace
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from proximo.config.ppo.options import PPOConfig
from proximo.config.ppo.trunk import trunk_problem
from proximo.errors import ConfigError
from proximo.models.dropout import disable_dropout
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.models.sharing.shared_base import base_alone
from proximo.models.sharing.trunk import scalar_on
from proximo.ppo.roles.inference import Roles
from proximo.rollout.local import LocalEngine
from proximo.run.build.stop_token_ids import ending_ids


def make_roles(
    policy: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    reference: LanguageModel | None,
    value: ScalarModel | Literal["trunk"] | None,
    config: PPOConfig,
    seed: int,
) -> Roles:
    """The roles that the configuration has a use for. A reference and a critic that were not brought are made.

    Raises ConfigError where the losses and optimizers of the configuration do not fit what policy and critic share.
    """
    if config.kl.apply_to == "none":
        reference = None
    elif reference is None:
        reference = base_alone(policy) if policy.has_adapter else policy.frozen_copy()
    if not config.uses_critic:
        value = None
    elif value == "trunk":
        value = scalar_on(policy, seed=seed)
    elif value is None:
        value = scalar_from_language_model(policy, HeadStart.ZERO, seed=seed)
    for model in (policy, value):
        if model is not None:
            disable_dropout(model.model)
    roles = Roles(
        policy=policy,
        reference=reference,
        value=value,
        engine=_engine(policy, tokenizer, config),
        reference_engine=_engine(reference, tokenizer, config) if reference and config.evaluate_reference else None,
    )
    if problem := trunk_problem(config, shares_trunk=roles.shares_trunk):
        raise ConfigError(problem)
    return roles


class Followers:
    """The models made of the policy's past: its moving average, and a reference that moves."""

    def __init__(self, roles: Roles, tokenizer: PreTrainedTokenizerBase, config: PPOConfig) -> None:
        self.roles = roles
        self.tokenizer = tokenizer
        self.config = config
        self.average = None if config.average_decay is None else roles.policy.frozen_copy()
        """None where none is kept."""

    def move(self, steps_done: int) -> None:
        """To be called after each step."""
        policy, kl, reference = self.roles.policy, self.config.kl, self.roles.reference
        if self.average is not None and self.config.average_decay is not None:
            follow(self.average.model, policy.model, decay=self.config.average_decay)
        if kl.reference_every_steps and reference is not None and steps_done % kl.reference_every_steps == 0:
            follow(reference.model, policy.model, decay=kl.reference_decay)

    @property
    def evaluated(self) -> Roles:
        """The roles of an evaluation: with `evaluate_average` the average stands for the policy."""
        if self.average is None or not self.config.evaluate_average:
            return self.roles
        return replace(self.roles, policy=self.average, engine=_engine(self.average, self.tokenizer, self.config))


def _engine(policy: LanguageModel, tokenizer: PreTrainedTokenizerBase, config: PPOConfig) -> LocalEngine:
    endings = ending_ids(policy.base, tokenizer)
    return LocalEngine(policy, tokenizer, eos_token_ids=endings, max_num_seqs=config.rollout.max_num_seqs)


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
