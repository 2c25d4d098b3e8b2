"""The objectives of the policy loss, one section each: `ppo.policy_loss.objective`. Their formulas are in algorithms/.

A new objective is a section here, in `Objective`, and its formula in `algorithms/objectives.py`.
"""

import math
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, WrapValidator

from proximo.config.schema.base import Section
from proximo.config.schema.fields import section_for
from proximo.config.schema.own_sections import taking_own


class ObjectiveConfig(Section):
    """What all objectives have in common. Of a subclass of yours, `kind` in a recipe is `package.module:Class`."""

    takes_own: ClassVar[bool] = True
    kind: str = "own"
    """The name of the objective."""
    is_pairwise: ClassVar[bool] = False
    """Whether the loss compares two responses to a prompt. Its formula is that of a pair then."""
    implies: ClassVar[Mapping[str, Any]] = {}
    """Other keys of the section `ppo`, which have these values where they are not given."""
    reads_responses: ClassVar[bool] = False
    """Whether the formula also takes the mask and the lengths of the responses."""
    clip_is_wider_than_rounding: ClassVar[bool] = True
    """Whether a token that is clipped before the first update shows more than the rounding of bf16."""
    formula_path: ClassVar[str]
    """Where the formula is, as `module:function`. It is given log-probs, old log-probs and advantages, [T] each, then
    what the flags here add, and `options`; it returns `TokenLosses` of algorithms/objectives.py."""

    @property
    def formula(self) -> Callable[..., Any]:
        """The function that computes the loss of each token, or of each pair. Loads torch."""
        return resolve_name(self.formula_path)

    @property
    def second_moment_limit(self) -> float | None:
        """Limit of the mean squared log-ratio of a minibatch, by leaving tokens out. It costs a pass per update."""
        return None

    @property
    def options(self) -> dict[str, Any]:
        """The options of the formula."""
        return self.model_dump(exclude={"kind"})


class PPOObjectiveConfig(ObjectiveConfig):
    """The clipped ratio of each token (arXiv:1707.06347)."""

    formula_path: ClassVar[str] = "proximo.algorithms.objectives:ppo"
    kind: Literal["ppo"] = "ppo"
    """The clip acts on each token by itself."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """Lower clip of the ratio at 1 - clip_low; 1 means no bound."""
    clip_high: float = Field(0.2, gt=0)
    """Upper clip of the ratio at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Bounds the loss of a token with a negative advantage by this times the size of the advantage; null does not. For
    stale samples, whose ratios may be large (arXiv:1912.09729 uses 3)."""


class ResponseObjectiveConfig(ObjectiveConfig):
    """What objectives with one ratio for a response have in common: responses count alike, whatever their length."""

    reads_responses: ClassVar[bool] = True
    implies: ClassVar[Mapping[str, Any]] = {"policy_loss": {"aggregation": "response_mean"}}


class GSPOConfig(ResponseObjectiveConfig):
    """PPO's clip with one ratio for a whole response (arXiv:2507.18071)."""

    formula_path: ClassVar[str] = "proximo.algorithms.objectives:gspo"
    clip_is_wider_than_rounding: ClassVar[bool] = False

    kind: Literal["gspo"] = "gspo"
    """The ratio of a response is the geometric mean of those of its tokens."""
    clip_low: float = Field(3e-4, gt=0, le=1)
    """Lower clip of the ratio at 1 - clip_low; 1 means no bound."""
    clip_high: float = Field(4e-4, gt=0)
    """Upper clip of the ratio at 1 + clip_high."""


class GMPOConfig(ResponseObjectiveConfig):
    """The geometric mean of a response's clipped ratios (arXiv:2507.20673)."""

    formula_path: ClassVar[str] = "proximo.algorithms.objectives:gmpo"

    kind: Literal["gmpo"] = "gmpo"
    """Each ratio is clipped by itself before the mean."""
    clip_low: float = Field(1 - math.exp(-0.4), gt=0, le=1)
    """Lower clip of the ratio at 1 - clip_low; the default is a log-ratio of -0.4. 1 means no bound."""
    clip_high: float = Field(math.exp(0.4) - 1, gt=0)
    """Upper clip of the ratio at 1 + clip_high; the default is a log-ratio of 0.4."""


class CISPOConfig(ObjectiveConfig):
    """The clipped ratio as a weight of the log-prob, so that every token keeps its gradient (arXiv:2506.13585)."""

    formula_path: ClassVar[str] = "proximo.algorithms.objectives:cispo"
    kind: Literal["cispo"] = "cispo"
    """The clip bounds how much a token counts, and never silences it."""
    clip_low: float = Field(1.0, gt=0, le=1)
    """Lower clip of the weight at 1 - clip_low; 1 means no bound, as in the paper."""
    clip_high: float = Field(0.2, gt=0)
    """Upper clip of the weight at 1 + clip_high."""


class SAPOConfig(ObjectiveConfig):
    """A soft gate instead of the clip (arXiv:2511.20347)."""

    formula_path: ClassVar[str] = "proximo.algorithms.objectives:sapo"
    kind: Literal["sapo"] = "sapo"
    """The further the ratio is from 1, the less the token counts."""
    gate_positive: float = Field(1.0, gt=0)
    """Steepness of the gate for positive advantages: raise both to hold the policy closer."""
    gate_negative: float = Field(1.05, gt=0)
    """Steepness of the gate for negative advantages."""


class M2POConfig(ObjectiveConfig):
    """No clip, but the tokens furthest from the old policy are left out (arXiv:2510.01161)."""

    formula_path: ClassVar[str] = "proximo.algorithms.objectives:m2po"
    kind: Literal["m2po"] = "m2po"
    """Which tokens are left out is decided for each minibatch, with one more pass of the policy."""
    max_second_moment: float = Field(0.04, gt=0)
    """Leave out the tokens with the largest squared log-ratio until the mean square of the others is at most this.
    Raise it if most tokens of stale samples are left out."""

    @property
    def second_moment_limit(self) -> float | None:
        """The largest mean square of log-ratios that is trained on: the key `max_second_moment`."""
        return self.max_second_moment

    @property
    def options(self) -> dict[str, Any]:
        """None: the mask says all."""
        return {}


class PairObjectiveConfig(ObjectiveConfig):
    """What the losses over pairs of responses to a prompt have in common; `kl.coefficient` is their beta."""

    is_pairwise: ClassVar[bool] = True
    implies: ClassVar[Mapping[str, Any]] = {
        "responses_per_prompt": 2,
        "kl": {"kind": "margin"},
        "advantage": {"kind": "group_centred"},
    }


class OnlineDPOConfig(PairObjectiveConfig):
    """The loss of DPO on the better and the worse of two responses to each prompt (docs/online-dpo.md)."""

    formula_path: ClassVar[str] = "proximo.algorithms.preferences:dpo_loss"
    kind: Literal["online_dpo"] = "online_dpo"
    """The sigmoid of the margin."""


class OnlineIPOConfig(PairObjectiveConfig):
    """The loss of IPO on the better and the worse of two responses to each prompt (docs/online-dpo.md)."""

    formula_path: ClassVar[str] = "proximo.algorithms.preferences:ipo_loss"
    kind: Literal["online_ipo"] = "online_ipo"
    """The squared distance of the margin from its target."""


Objective = SerializeAsAny[
    Annotated[
        PPOObjectiveConfig
        | GSPOConfig
        | GMPOConfig
        | CISPOConfig
        | SAPOConfig
        | M2POConfig
        | OnlineDPOConfig
        | OnlineIPOConfig,
        Field(discriminator="kind"),
        WrapValidator(taking_own(ObjectiveConfig)),
    ]
]
"""All objectives, the default first."""


def objective_class(given: Any) -> type[ObjectiveConfig] | None:
    """The section of an objective as a recipe gives it, before it is validated; None for an unknown one."""
    if isinstance(given, ObjectiveConfig):
        return type(given)
    kind = given.get("kind") if isinstance(given, dict) else given
    section = section_for(Objective, {"kind": kind})
    return section if section is not None and issubclass(section, ObjectiveConfig) else None
