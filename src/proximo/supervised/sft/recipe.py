"""The recipe schema of `proximo sft`."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from proximo.config.data import TextDataConfig
from proximo.config.recipe import TrainerRecipe, check_one_pass, check_quantisation, check_tokenizer
from proximo.config.run import ModelConfig, OptimizerConfig, TokenizerConfig
from proximo.config.schema.base import Section


class SFTConfig(Section):
    """How often and in which portions supervised fine-tuning goes through the examples."""

    num_epochs: float = Field(1.0, gt=0)
    """Epochs over the data; may be fractional."""
    examples_per_step: int = Field(32, ge=1)
    """Examples per update."""
    tokens_per_microbatch: int = Field(8192, ge=1)
    """Maximum tokens of one forward and backward pass; changes memory and speed, not the gradient."""
    dropout: bool = False
    """Use the model's dropout in training."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5, schedule="cosine")
    """Optimizer of the model."""

    @property
    def rows_per_update(self) -> int:
        """Examples that each update learns from, over all micro-batches and ranks."""
        return self.examples_per_step


class SFTRecipe(TrainerRecipe):
    """What `proximo sft` reads: the model, the examples, and how it trains on them."""

    memory_settings: ClassVar[str] = "lower sft.tokens_per_microbatch, or set model.activation_checkpointing"

    model: ModelConfig
    """The model to train."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Its tokenizer."""
    data: TextDataConfig
    """Training data."""
    sft: SFTConfig = SFTConfig()
    """Training settings."""

    @model_validator(mode="after")
    def _has_tokenizer(self) -> Self:
        check_quantisation(self.model, "model", self.run)
        if self.tokenizer.train_vocab_size is None:
            check_tokenizer(self.model, "model", self.tokenizer)
        elif self.model.path is not None:
            raise ValueError(
                "tokenizer.train_vocab_size makes a new tokenizer, whose ids do not fit trained weights: set "
                "model.config, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _one_pass_in_backward(self) -> Self:
        longest, budget = self.sft.examples_per_step * self.data.max_tokens, self.sft.tokens_per_microbatch
        check_one_pass(self.sft.optimizer, longest=longest, budget=budget, section="sft", rows="sft.examples_per_step")
        return self

    def longest_sequence(self) -> dict[str, int]:
        return {"data.max_tokens": self.data.max_tokens}
