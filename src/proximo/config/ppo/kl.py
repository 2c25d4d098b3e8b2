"""Config sections `ppo.kl`: what the KL does, and the reference that it is measured from."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from proximo.config.schema.base import Section


class AdaptiveKLConfig(Section):
    """The controller of the KL coefficient (arXiv:1909.08593)."""

    target: float = Field(gt=0)
    """The mean KL of a response that the coefficient is to reach, in nats (sum of k1)."""
    horizon: int = Field(10_000, ge=1)
    """Number of responses over which the coefficient adapts."""


class KLConfig(Section):
    """What the KL terms have in common."""

    needs_reference: ClassVar[bool] = True
    """Whether a reference is loaded."""
    in_loss: ClassVar[bool] = False
    """Whether the KL is added to the policy loss."""
    in_margin: ClassVar[bool] = False
    """Whether the objective compares policy and reference itself."""

    kind: str
    """What the KL does, by name."""
    coefficient: float = Field(0.05, ge=0)
    """Weight of the KL; the initial weight if it is adaptive."""
    adaptive: AdaptiveKLConfig | None = None
    """Adapt the coefficient to a target; null keeps it constant."""
    reference_every_steps: int | None = Field(None, ge=1)
    """Move the reference towards the policy after this many steps; null never moves it. For long runs, whose policy
    would else be held to where it started (ProRL resets it)."""
    reference_decay: float = Field(0.0, ge=0, lt=1)
    """Weight of the old reference when it moves: 0 makes it a copy of the policy. For a reference that follows softly
    (TR-DPO)."""

    @property
    def full_in(self) -> Literal["reward", "loss"] | None:
        """Where the KL over the whole vocabulary is, which needs policy and reference at once; None if nowhere."""
        return None

    @model_validator(mode="after")
    def _can_adapt(self) -> Self:
        if self.adaptive is not None and self.coefficient == 0:
            raise ValueError("a coefficient of 0 never changes, because it adapts by a factor; set it above 0")
        return self


class TokenKLConfig(KLConfig):
    """What the kinds have in common that weigh the KL of each token."""

    clamp: float | None = Field(None, gt=0)
    """Clip the KL of a token to plus and minus this many nats before weighting; null does not clip. In the loss a
    clipped KL has no gradient. For k3, of which one token can outweigh all others: verl clips at 10."""


class RewardKLConfig(TokenKLConfig):
    """The KL subtracted from the rewards."""

    kind: Literal["reward"] = "reward"
    """Each token is charged its own KL."""
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"
    """k1 has the gradient of the sequence KL; full has only the part through later states; k2, k3 and abs are
    biased."""

    @property
    def full_in(self) -> Literal["reward", "loss"] | None:
        """See the base class."""
        return "reward" if self.estimator == "full" else None


class LossKLConfig(TokenKLConfig):
    """The KL added to the policy loss."""

    in_loss: ClassVar[bool] = True

    kind: Literal["loss"] = "loss"
    """The gradient is the KL's own at each visited state."""
    estimator: Literal["k2", "weighted_k3", "full"] = "k2"
    """All of them have the gradient of the KL at each visited state; k1 has none on average, plain k3 that of the
    forward KL."""

    @property
    def full_in(self) -> Literal["reward", "loss"] | None:
        """See the base class."""
        return "loss" if self.estimator == "full" else None


class MarginKLConfig(KLConfig):
    """The KL within the margin of the objectives `online_dpo` and `online_ipo`, which imply it."""

    in_margin: ClassVar[bool] = True

    kind: Literal["margin"] = "margin"
    """`coefficient` is the beta of DPO and IPO."""


class NoKLConfig(Section):
    """No KL, and no reference."""

    needs_reference: ClassVar[bool] = False
    in_loss: ClassVar[bool] = False
    in_margin: ClassVar[bool] = False
    coefficient: ClassVar[float] = 0.0
    adaptive: ClassVar[None] = None
    reference_every_steps: ClassVar[None] = None
    full_in: ClassVar[None] = None

    kind: Literal["none"] = "none"
    """The policy may go anywhere."""


KL = Annotated[RewardKLConfig | LossKLConfig | MarginKLConfig | NoKLConfig, Field(discriminator="kind")]
"""All that a KL can do, the default first."""
