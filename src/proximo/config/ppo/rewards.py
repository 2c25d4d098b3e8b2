"""Config sections `ppo.score`, `ppo.truncation` and `ppo.kl`: how scores and the KL become the rewards of tokens.

The sources of scores: section `reward`.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from proximo.config.schema.base import Section


class ScoreConfig(Section):
    """Shaping of scores before they become rewards, in the order of docs/ppo.md, "From score to reward"."""

    minus_reference_answer: bool = False
    """Subtract the score of the prompt's reference answer from the same sources; every prompt needs one."""
    bias: float = 0.0
    """Added to the score, before `scale`: (score + bias) * scale."""
    scale: float = Field(1.0, gt=0)
    """Factor of the score, after `bias`."""
    normalise: Literal["none", "scale", "standardise"] = "none"
    """`scale` divides scores by their standard deviation over the run so far, this step's scores included;
    `standardise` subtracts their mean over the run first."""
    clip: float | None = Field(None, gt=0)
    """Clip scores to plus and minus this value; token-level rewards separately. Penalties come after the clip."""
    missing_eos_penalty: float | None = Field(None, gt=0)
    """Penalty of a response without an end: neither an end-of-sequence token nor a stop."""
    min_tokens: int | None = Field(None, ge=1)
    """Responses with fewer tokens, including the end-of-sequence token, get `min_tokens_penalty`."""
    min_tokens_penalty: float | None = Field(None, gt=0)
    """Penalty of a response that is shorter than `min_tokens`."""
    penalty_mode: Literal["add", "replace"] = "add"
    """How `missing_eos_penalty` and `min_tokens_penalty` apply: `add` subtracts them from the score, `replace` replaces
    the score by minus the penalty."""
    overlong_buffer_tokens: int | None = Field(None, ge=1)
    """The length penalty rises from 0 over this many tokens before `rollout.max_new_tokens`; null disables it. DAPO
    uses 4096 of 20480."""
    overlong_penalty: float = Field(1.0, gt=0)
    """Penalty of a response of `rollout.max_new_tokens` tokens, with `overlong_buffer_tokens`."""
    whiten_rewards: Literal["none", "keep_mean", "zero_mean"] = "none"
    """Scale token rewards, with the KL, to variance 1 over the valid tokens of the step, and keep their mean or set it
    to 0."""

    @property
    def shapes(self) -> bool:
        """True if the reward of a response may differ from its score."""
        alone = {"whiten_rewards", "penalty_mode", "overlong_penalty"}  # these alone change no score
        defaults = {name: field.default for name, field in type(self).model_fields.items() if name not in alone}
        return any(getattr(self, name) != default for name, default in defaults.items())

    def conflicts(self) -> Iterator[str]:
        if (self.min_tokens is None) != (self.min_tokens_penalty is None):
            yield "min_tokens and min_tokens_penalty must be set together"

    def length_conflicts(self, max_new_tokens: int, random_limit_min: int | None) -> Iterator[str]:
        """Numbers of tokens above the limit of a response, so that all, or those of a random limit, are penalised."""
        shortest = random_limit_min or max_new_tokens
        for key, limit in {"min_tokens": shortest, "overlong_buffer_tokens": max_new_tokens}.items():
            if (getattr(self, key) or 0) > limit:
                name = "max_new_tokens" if limit == max_new_tokens else "random_limit_min"
                yield f"score.{key} ({getattr(self, key)}) must not exceed rollout.{name} ({limit}): lower it"


class TruncationConfig(Section):
    """What all kinds have in common: by default a cut response is like any other."""

    keeps_score: ClassVar[bool] = True
    """Whether a cut response has a score."""
    bootstraps: ClassVar[bool] = False
    """Whether the value model estimates what would have come after the end; else its value is 0."""
    masks: ClassVar[bool] = False
    """Whether a cut response counts nowhere."""


class ScoredTruncationConfig(TruncationConfig):
    """A cut response is scored like any other, and its value after the end is 0."""

    kind: Literal["scored"] = "scored"
    """The limit is part of the task."""
    scale: float = Field(1.0, ge=0, le=1)
    """Factor for the score, after `score.clip`; for scores that are never negative. For tasks in which a cut answer may
    still be right, but is worth less."""


class UnscoredTruncationConfig(TruncationConfig):
    """A cut response has no score, and its value after the end is 0."""

    keeps_score: ClassVar[bool] = False
    scale: ClassVar[float] = 1.0

    kind: Literal["unscored"] = "unscored"
    """A text without an end cannot be judged."""


class BootstrapTruncationConfig(TruncationConfig):
    """A cut response has no score, and its value after the end is the value model's estimate."""

    keeps_score: ClassVar[bool] = False
    bootstraps: ClassVar[bool] = True
    scale: ClassVar[float] = 1.0

    kind: Literal["bootstrap"] = "bootstrap"
    """The limit cuts off a future. Needs `advantage: gae`."""


class MaskTruncationConfig(TruncationConfig):
    """A cut response counts nowhere: not in the loss, in statistics or in its group."""

    masks: ClassVar[bool] = True
    scale: ClassVar[float] = 1.0

    kind: Literal["mask"] = "mask"
    """The limit says nothing about the response."""


Truncation = Annotated[
    ScoredTruncationConfig | UnscoredTruncationConfig | BootstrapTruncationConfig | MaskTruncationConfig,
    Field(discriminator="kind"),
]
"""All that a cut response can be worth, the default first."""


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

    def conflicts(self) -> Iterator[str]:
        if self.adaptive is not None and self.coefficient == 0:
            yield "a coefficient of 0 never changes, because it adapts by a factor; set it above 0"


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
        """`reward` if the KL over the whole vocabulary is subtracted from the rewards, else None."""
        return "reward" if self.estimator == "full" else None


class LossKLConfig(TokenKLConfig):
    """The KL added to the policy loss."""

    in_loss: ClassVar[bool] = True

    kind: Literal["loss"] = "loss"
    """The gradient is the KL's own at each visited state."""
    estimator: Literal["weighted_k3", "k2", "full"] = "weighted_k3"
    """weighted_k3 and full have the gradient of the KL at each visited state, k2 only in the first update of a step; k1
    would have none on average, plain k3 that of the forward KL."""

    @property
    def full_in(self) -> Literal["reward", "loss"] | None:
        """`loss` if the KL over the whole vocabulary is added to the loss, else None."""
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
