"""The recipe schema of `proximo reward`."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from proximo.config.data import PreferenceDataConfig
from proximo.config.recipe import check_one_pass
from proximo.config.run import OptimizerConfig
from proximo.config.schema.base import Section
from proximo.supervised.scalar_recipe import ScalarRecipe


class RewardTrainingConfig(Section):
    """Training of a reward model on preference pairs."""

    num_epochs: float = Field(1.0, gt=0)
    """Epochs over the pairs; more than one often overfits."""
    pairs_per_step: int = Field(32, ge=1)
    """Pairs per update."""
    tokens_per_microbatch: int = Field(8192, ge=1)
    """Maximum tokens of one forward and backward pass; changes memory and speed, not the gradient."""
    loss: Literal["bradley_terry", "divergence_window"] = "bradley_terry"
    """`bradley_terry` compares the scores of the last tokens; `divergence_window` compares the scores of all tokens
    from the first difference of the answers on (as DeepSpeed-Chat)."""
    score_centring: float = Field(0.0, ge=0)
    """Weight of the squared sum of both scores, which keeps scores near 0; for `bradley_terry`."""
    dropout: bool = False
    """Use the model's dropout in training."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5, schedule="linear")
    """Optimizer of the model."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.score_centring > 0 and self.loss != "bradley_terry":
            raise ValueError(f"score_centring needs loss: bradley_terry; remove it with {self.loss}")
        return self

    @property
    def rows_per_update(self) -> int:
        """Preference pairs that each update learns from, over all micro-batches and ranks."""
        return self.pairs_per_step


class RewardRecipe(ScalarRecipe):
    """What `proximo reward` reads: the model, the preference pairs, and how it trains on them."""

    memory_settings: ClassVar[str] = "lower reward.tokens_per_microbatch, or set model.activation_checkpointing"

    data: PreferenceDataConfig
    """Preference pairs."""
    reward: RewardTrainingConfig = RewardTrainingConfig()
    """Training settings."""

    @model_validator(mode="after")
    def _one_pass_in_backward(self) -> Self:
        longest, budget = 2 * self.reward.pairs_per_step * self.data.max_tokens, self.reward.tokens_per_microbatch
        check_one_pass(
            self.reward.optimizer, longest=longest, budget=budget, section="reward", rows="reward.pairs_per_step"
        )
        return self

    def longest_sequence(self) -> dict[str, int]:
        return {"data.max_tokens": self.data.max_tokens}
