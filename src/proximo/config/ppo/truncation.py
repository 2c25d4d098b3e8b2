"""Config sections `ppo.truncation`: what a response is worth that was cut at the limit."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from proximo.config.schema.base import Section


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
