"""Converts config sections to the plain option types of learner/, data/ and models/. Builds no models."""

from collections.abc import Mapping

import torch

from proximo.config.data import PromptDataConfig, StepDataConfig, TextDataConfig
from proximo.config.run import OptimizerConfig
from proximo.data.examples import ExampleOptions
from proximo.data.prompts import PromptOptions
from proximo.data.step_examples import StepOptions
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


def example_options(config: TextDataConfig) -> ExampleOptions:
    """How rows become training texts."""
    return ExampleOptions(
        form=config.form,
        train_on=config.train_on,
        max_tokens=config.max_tokens,
        too_long=config.too_long,
        layout=config.layout,
        as_messages=config.as_messages,
        system=config.system,
    )


def step_options(config: StepDataConfig) -> StepOptions:
    """How rows become solutions with labels."""
    return StepOptions(
        separator=config.step_separator,
        train_on=config.train_on,
        max_tokens=config.max_tokens,
        too_long=config.too_long,
        as_messages=config.as_messages,
        system=config.system,
    )


def prompt_options(data: PromptDataConfig) -> PromptOptions:
    """How rows become prompts."""
    return PromptOptions(
        max_tokens=data.max_prompt_tokens,
        too_long=data.too_long,
        as_messages=data.as_messages,
        system=data.system,
        first_words=data.first_words,
        fill_to_max=data.fill_to_max,
    )


def check_optimizer(config: OptimizerConfig | None, device: torch.device) -> None:
    """Raises MissingExtraError or ConfigError if this machine cannot run the optimizer. Call it before models load."""
    if config is not None and config.kind != "adamw":
        check_low_memory(config.kind, device)


def optimizer_options(config: OptimizerConfig) -> OptimizerOptions:
    """The learner's options; the names are the same."""
    return OptimizerOptions(**config.model_dump())
