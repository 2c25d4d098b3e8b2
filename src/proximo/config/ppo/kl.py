"""Config section `ppo.kl`: the KL penalty, and the reference that it is measured from."""

from typing import Literal, Self

from pydantic import Field, model_validator

from proximo.config.schema.base import Section


class KLConfig(Section):
    """The KL penalty, which keeps the policy near the reference."""

    apply_to: Literal["reward", "loss", "margin", "none"] = "reward"
    """Subtract the KL from the reward, add it to the loss, or do not use it (then no reference is loaded). `margin` is
    for the objectives `online_dpo` and `online_ipo`, whose default it is: their margin compares policy and
    reference."""
    estimator: Literal["k1", "k2", "k3", "abs", "full", "weighted_k3"] = "k1"
    """In the reward: k1 has the gradient of the sequence KL; full has only the part through later states; k2, k3 and
    abs are biased. In the loss only k2, weighted_k3 and full are accepted, which have the gradient of the KL at each
    visited state."""
    clamp: float | None = Field(None, gt=0)
    """Clip the KL of a token to plus and minus this many nats before weighting; null does not clip. In the loss a
    clipped KL has no gradient."""
    coefficient: float = Field(0.05, ge=0)
    """Weight of the KL; the initial weight if it is adaptive. With `margin` the beta of DPO and IPO."""
    target: float | None = Field(None, gt=0)
    """Adapt the coefficient so that the mean KL of a response (nats, sum of k1) approaches this target; null keeps it
    constant."""
    horizon: int = Field(10_000, ge=1)
    """Number of responses over which the coefficient adapts."""
    reference_every_steps: int | None = Field(None, ge=1)
    """Move the reference towards the policy after this many steps; null never moves it."""
    reference_decay: float = Field(0.0, ge=0, lt=1)
    """Weight of the old reference when it moves: 0 makes it a copy of the policy."""

    @model_validator(mode="after")
    def _right_gradient(self) -> Self:
        if self.apply_to == "loss" and self.estimator not in ("k2", "weighted_k3", "full"):
            raise ValueError(
                f"estimator {self.estimator} in the loss does not have the gradient of the KL "
                "(k1: zero on average; plain k3: that of the forward KL); use k2, weighted_k3 or full, "
                "or apply_to: reward"
            )
        if self.apply_to == "reward" and self.estimator == "weighted_k3":
            raise ValueError("estimator weighted_k3 works in the loss only; in the reward use k1")
        if self.target is not None and self.coefficient == 0:
            raise ValueError("a coefficient of 0 never changes, because it adapts by a factor; set it above 0")
        return self
