"""The recipe schema of `proximo prm`."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from proximo.config.data import StepDataConfig
from proximo.config.recipe import check_one_pass
from proximo.config.run import OptimizerConfig
from proximo.config.schema.base import Section
from proximo.supervised.scalar_recipe import ScalarRecipe


class PRMConfig(Section):
    """Training of a process reward model on solutions whose steps have labels."""

    num_epochs: float = Field(1.0, gt=0)
    """Epochs over the solutions."""
    solutions_per_step: int = Field(32, ge=1)
    """Solutions per update."""
    tokens_per_microbatch: int = Field(8192, ge=1)
    """Maximum tokens of one forward and backward pass; changes memory and speed, not the gradient."""
    dropout: bool = False
    """Use the model's dropout in training."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5, schedule="linear")
    """Optimizer of the model."""

    @property
    def rows_per_update(self) -> int:
        """Solutions that each update learns from, over all micro-batches and ranks."""
        return self.solutions_per_step


class PRMRecipe(ScalarRecipe):
    """What `proximo prm` reads: the model, the solutions with their labels, and how it trains on them."""

    memory_settings: ClassVar[str] = "lower prm.tokens_per_microbatch, or set model.activation_checkpointing"

    data: StepDataConfig
    """Solutions in steps."""
    prm: PRMConfig = PRMConfig()
    """Training settings."""

    @model_validator(mode="after")
    def _one_pass_in_backward(self) -> Self:
        longest, budget = self.prm.solutions_per_step * self.data.max_tokens, self.prm.tokens_per_microbatch
        check_one_pass(self.prm.optimizer, longest=longest, budget=budget, section="prm", rows="prm.solutions_per_step")
        return self

    def longest_sequence(self) -> dict[str, int]:
        return {"data.max_tokens": self.data.max_tokens}
