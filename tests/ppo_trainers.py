"""Trainers of PPO with tiny models, prompts for them and rewards that need no model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from builders import tiny_language_model, tiny_tokenizer
from proximo.config.ppo.options import PPOConfig
from proximo.ppo.trainer import PPOTrainer

PROMPTS = ["ab", "cde", "f", "gh"]
LARGE = {"learning_rate": 1e-2}
"""A rate at which one step moves every weight."""


def ppo_trainer(policy: Any = None, **options: Any) -> PPOTrainer:
    """A trainer of a tiny model; what is no key of the section `ppo` is given to the trainer itself."""
    base = {"num_steps": 4, "prompts_per_step": 4, "rollout": {"max_new_tokens": 6}, "policy_optimizer": LARGE}
    own = {name: options.pop(name) for name in list(options) if name not in PPOConfig.model_fields}
    config = PPOConfig(**(base | options))
    return PPOTrainer(policy or tiny_language_model(), tiny_tokenizer(), config=config, **own)


def count_a(prompts: Any, responses: Sequence[str], metadata: Any) -> list[float]:
    return [float(text.count("a")) for text in responses]


def count_a_and_letters(prompts: Any, responses: Sequence[str], metadata: Any) -> list[float]:
    return [float(text.count("a")) + len(text) for text in responses]


def lengths(prompts: Any, responses: Sequence[str], metadata: Any) -> list[float]:
    return [float(len(text)) for text in responses]


def all_weights(model: nn.Module) -> Tensor:
    """A copy of all weights of a model, as one row of numbers."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
