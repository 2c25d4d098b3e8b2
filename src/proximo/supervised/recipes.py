"""What the recipes of supervised trainers have alike: of all, of those with a score head, of those with a reference."""

from abc import abstractmethod
from collections.abc import Iterator
from itertools import chain
from typing import ClassVar, Protocol

from pydantic import Field

from proximo.config.data import LabelledDataConfig, PreferenceDataConfig, StepDataConfig, TextDataConfig
from proximo.config.devices import PlacedRole
from proximo.config.recipe import (
    TrainerRecipe,
    one_pass_conflicts,
    quantisation_conflicts,
    reference_conflicts,
    tokenizer_conflicts,
)
from proximo.config.run import ModelConfig, OptimizerConfig, ScalarModelConfig, TokenizerConfig
from proximo.config.schema.base import Section


class SupervisedConfig(Protocol):
    """The training settings that all supervised trainers have."""

    @property
    def num_epochs(self) -> float: ...
    @property
    def rows_per_update(self) -> int: ...
    @property
    def tokens_per_microbatch(self) -> int: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...


class UpdateSection(Section):
    """A section with the training settings of a supervised trainer."""

    rows_key: ClassVar[str]
    """Its key with the number of rows of an update: examples, pairs or solutions."""

    num_epochs: float = Field(1.0, gt=0)
    """Epochs over the data; may be fractional. For pairs more than one often overfits."""
    tokens_per_microbatch: int = Field(8192, ge=1)
    """Maximum tokens of one forward and backward pass; changes memory and speed, not the gradient. On CUDA a recipe
    that leaves it out gets what fits the memory of the device, from 2048 to 32768."""

    @property
    def rows_per_update(self) -> int:
        """Rows that each update learns from, over all micro-batches and ranks."""
        return getattr(self, self.rows_key)


class DropoutSection(UpdateSection):
    """The section of a trainer whose model may train with its own dropout."""

    dropout: bool = False
    """Use the model's dropout in training."""


class SupervisedRecipe(TrainerRecipe):
    """A recipe whose updates are over rows of data."""

    section: ClassVar[str]
    """The key of its training settings."""
    sequences_per_row: ClassVar[int] = 1
    """Sequences that the trained model reads for a row: 2 for a pair."""

    model: ModelConfig | ScalarModelConfig
    """The model to train."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Its tokenizer."""
    data: TextDataConfig | PreferenceDataConfig | StepDataConfig | LabelledDataConfig
    """Training data."""

    @property
    def training(self) -> SupervisedConfig:
        """The section with the settings of training."""
        return getattr(self, self.section)

    @abstractmethod
    def conflicts_of_models(self) -> Iterator[str]:
        """Models and tokenizer that cannot be used together."""

    def conflicts(self) -> Iterator[str]:
        yield from chain(super().conflicts(), self.conflicts_of_models())
        config, section = getattr(self, self.section), self.section
        longest = self.sequences_per_row * config.rows_per_update * self.data.max_tokens
        rows, budget = f"{section}.{config.rows_key}", config.tokens_per_microbatch
        yield from one_pass_conflicts(config.optimizer, longest=longest, budget=budget, section=section, rows=rows)

    def longest_sequence(self) -> dict[str, int]:
        return {"data.max_tokens": self.data.max_tokens}


class ScalarRecipe(SupervisedRecipe):
    """A recipe that trains a model with a scalar head. Its base comes from a folder, the Hub or a configuration."""

    model: ScalarModelConfig
    """The model that it starts from."""

    def conflicts_of_models(self) -> Iterator[str]:
        if self.model.init_from != "path":
            yield "model needs path (trained weights) or config (random weights)"
        yield from quantisation_conflicts(self.model, "model", self.run)
        yield from tokenizer_conflicts(self.model, "model", self.tokenizer)


class ReferenceRecipe(SupervisedRecipe):
    """A recipe that trains a policy and compares it with a frozen reference."""

    model: ModelConfig
    """The policy to train, preferably a fine-tuned model. The reference is a frozen copy of it, or its base with
    LoRA."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The policy's tokenizer."""
    reference: ModelConfig | None = None
    """Another reference than a copy of the policy; it must have the policy's vocabulary."""

    @property
    def readings(self) -> dict[str, int]:
        """Role -> how often its model reads as many rows as an update takes before it."""
        return {"reference": 1}

    def conflicts_of_models(self) -> Iterator[str]:
        yield from tokenizer_conflicts(self.model, "model", self.tokenizer)
        if self.model.lora is not None and self.reference is not None:
            yield "with model.lora the base is the reference: remove reference, or train without LoRA"
        yield from reference_conflicts(self.reference, self.run)
        yield from quantisation_conflicts(self.model, "model", self.run)

    def placed_roles(self) -> tuple[PlacedRole, ...]:
        trained, *_ = super().placed_roles()
        base = "model" if self.model.lora is not None else None
        common = self.reference is None and (base is not None or self.model.frozen_layers > 0)
        reference = PlacedRole(
            role="reference", key="reference", model=self.reference, shares=base, has_common_tensors=common
        )
        return trained, reference
