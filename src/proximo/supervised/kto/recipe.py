"""The recipe schema of `proximo kto`."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from proximo.config.data import LabelledDataConfig
from proximo.config.recipe import check_one_pass
from proximo.config.run import OptimizerConfig
from proximo.config.schema.base import Section
from proximo.supervised.reference_recipe import ReferenceRecipe


class KTOConfig(Section):
    """Kahneman-Tversky optimisation. The model's dropout is disabled, so policy and reference compute alike."""

    num_epochs: float = Field(1.0, gt=0)
    """Epochs over the answers."""
    examples_per_step: int = Field(32, ge=2)
    """Answers per update. The KL term is estimated over all of them."""
    tokens_per_microbatch: int = Field(8192, ge=1)
    """Maximum tokens of one forward and backward pass; changes memory and speed, not the gradient."""
    beta: float = Field(0.1, gt=0)
    """Reward of one nat of log-ratio to the reference: the smaller it is, the further the policy may move."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of desirable answers in the loss (lambda_D)."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of undesirable answers in the loss (lambda_U)."""
    reference_point: Literal["kl", "zero"] = "kl"
    """What the reward of an answer is compared with. `kl`: the KL divergence from the reference, estimated with answers
    to other prompts, which takes another pass of both models. `zero`: 0, without that pass."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-6, schedule="linear")
    """Optimizer of the policy."""

    @property
    def rows_per_update(self) -> int:
        """Answers that each update learns from, over all micro-batches and ranks."""
        return self.examples_per_step


class KTORecipe(ReferenceRecipe):
    """What `proximo kto` reads: the policy, the labelled answers, and how it trains on them."""

    memory_settings: ClassVar[str] = "lower kto.tokens_per_microbatch, or set model.activation_checkpointing"

    data: LabelledDataConfig
    """Labelled answers."""
    kto: KTOConfig = KTOConfig()
    """Training settings."""

    @model_validator(mode="after")
    def _one_pass_in_backward(self) -> Self:
        longest, budget = self.kto.examples_per_step * self.data.max_tokens, self.kto.tokens_per_microbatch
        check_one_pass(self.kto.optimizer, longest=longest, budget=budget, section="kto", rows="kto.examples_per_step")
        return self

    def longest_sequence(self) -> dict[str, int]:
        return {"data.max_tokens": self.data.max_tokens}
