"""The recipe schema of `proximo dpo`."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from proximo.config.data import PreferenceDataConfig
from proximo.config.recipe import check_one_pass
from proximo.config.run import OptimizerConfig
from proximo.config.schema.base import Section
from proximo.supervised.reference_recipe import ReferenceRecipe


class DPOConfig(Section):
    """Direct preference optimisation. The model's dropout is disabled, so policy and reference compute alike."""

    num_epochs: float = Field(1.0, gt=0)
    """Epochs over the pairs; more than one often overfits."""
    pairs_per_step: int = Field(32, ge=1)
    """Pairs per update."""
    tokens_per_microbatch: int = Field(8192, ge=1)
    """Maximum tokens of one forward and backward pass; changes memory and speed, not the gradient."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: the loss of DPO, which increases the margin of a pair without limit. `ipo`: drives the difference of
    the log-ratios to 1 / (2 beta)."""
    beta: float = Field(0.1, gt=0)
    """Reward of one nat of log-ratio to the reference: the smaller it is, the further the policy may move."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Expected fraction of wrong labels (conservative DPO); 0 trusts all labels."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-7, schedule="linear")
    """Optimizer of the policy."""

    @model_validator(mode="after")
    def _smooths_labels(self) -> Self:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing needs loss: sigmoid; ipo has a fixed margin already: remove it")
        return self

    @property
    def rows_per_update(self) -> int:
        """Preference pairs that each update learns from, over all micro-batches and ranks."""
        return self.pairs_per_step


class DPORecipe(ReferenceRecipe):
    """What `proximo dpo` reads: the policy, the preference pairs, and how it trains on them."""

    memory_settings: ClassVar[str] = "lower dpo.tokens_per_microbatch, or set model.activation_checkpointing"

    data: PreferenceDataConfig
    """Preference pairs."""
    dpo: DPOConfig = DPOConfig()
    """Training settings."""

    @model_validator(mode="after")
    def _one_pass_in_backward(self) -> Self:
        longest, budget = 2 * self.dpo.pairs_per_step * self.data.max_tokens, self.dpo.tokens_per_microbatch
        check_one_pass(self.dpo.optimizer, longest=longest, budget=budget, section="dpo", rows="dpo.pairs_per_step")
        return self

    def longest_sequence(self) -> dict[str, int]:
        return {"data.max_tokens": self.data.max_tokens}
