"""Converts config sections to the options of the learner. Builds no models."""

from collections.abc import Mapping

import torch

from proximo.config.run import OptimizerConfig
from proximo.learner.optimizers import OptimizerOptions, check_low_memory
from proximo.learner.update import Learner
from proximo.message_text import count_of


def schedule_notes(learners: Mapping[str, Learner]) -> list[str]:
    """A warning for every model whose learning-rate warm-up is longer than the run."""
    return [
        f"the learning rate of the {role} model never reaches its peak: warmup_updates is "
        f"{learner.options.warmup_updates}, and the run has {count_of(learner.num_updates, 'update')}: lower "
        "warmup_updates of its optimizer, or train for longer"
        for role, learner in learners.items()
        if isinstance(learner.options, OptimizerOptions) and learner.options.warmup_updates >= learner.num_updates
    ]


def check_optimizer(config: OptimizerConfig | None, device: torch.device) -> None:
    """Raises MissingExtraError or ConfigError if this machine cannot run the optimizer. Call it before models load."""
    if config is not None and config.kind != "adamw":
        check_low_memory(config.kind, device)


def optimizer_options(config: OptimizerConfig) -> OptimizerOptions:
    """The learner's options; the names are the same."""
    return OptimizerOptions(**config.model_dump())
