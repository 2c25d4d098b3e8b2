"""How a policy learns from preference pairs directly. Not where the pairs come from: that is data.py."""

from typing import Literal, Self

from pydantic import Field, model_validator

from proximo.config.run import OptimizerConfig
from proximo.config.schema.base import Section


class DPOConfig(Section):
    """Direct preference optimisation. The model's own dropout is off, so that policy and reference read alike."""

    num_epochs: float = Field(1.0, gt=0)
    """Passes over the pairs; more than one overfits soon."""
    pairs_per_step: int = Field(32, ge=1)
    """Pairs of one update."""
    tokens_per_microbatch: int = Field(8192, ge=1)
    """Tokens of one forward and backward pass; changes memory and speed, not the gradient."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: that of DPO, which pushes the answers of a pair apart without end. `ipo`: draws the difference of
    their log-ratios to 1 / (2 beta)."""
    beta: float = Field(0.1, gt=0)
    """What a nat of log-ratio to the reference is worth in reward: the smaller, the further the policy may go."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs whose label is taken to be the wrong way round (conservative DPO); 0 believes them all."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-7, schedule="linear")
    """Optimizer of the policy."""

    @model_validator(mode="after")
    def _smooths_labels(self) -> Self:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError(
                "label_smoothing is for loss: sigmoid; ipo does not push pairs apart without end: remove it"
            )
        return self

    @property
    def rows_per_update(self) -> int:
        """Pairs of one update."""
        return self.pairs_per_step
