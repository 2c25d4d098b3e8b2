"""What policy and value model minimise in PPO, and what guards their updates. The other sections are in options.py."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from proximo.config.schema.base import Section

CLIPS = {
    "ppo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "gmpo": (1 - math.exp(-0.4), math.exp(0.4) - 1),
    "cispo": (1.0, 0.2),
    "sapo": (1.0, math.inf),
    "m2po": (1.0, math.inf),
}
"""Objective -> how far below and above 1 the ratio may go; sapo has a gate in place of a clip, m2po a choice."""


class RejectionConfig(Section):
    """What is left out of the policy's updates because the sampler was too far from the policy of the step's start."""

    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Divergence of the sampler from the policy at a token, in nats; k1, the log-ratio, counts by its size."""
    over: Literal["token", "mean", "sum", "max"] = "token"
    """Leave out single tokens, or whole responses by the mean, sum or maximum of their tokens. The mean of k1 is that
    of a geometric mean of the ratios."""
    limit: float = Field(gt=0)
    """What is further than this, in nats, is left out."""


class PolicyLossConfig(Section):
    """What the policy minimises."""

    objective: Literal["ppo", "gspo", "gmpo", "cispo", "sapo", "m2po"] = "ppo"
    """`ppo`: the clipped ratio of each token. `gspo`: one ratio for a whole response. `gmpo`: the geometric mean of a
    response's clipped ratios. `cispo`: the clipped ratio as a weight of the log-prob, so that no token is silenced.
    `sapo`: a gate that closes gradually instead of the clip. `m2po`: no clip, but without the tokens furthest from the
    old policy; see `max_second_moment`."""
    clip_low: float | None = Field(None, gt=0, le=1)
    """The ratio is clipped below at 1 - clip_low; 1 is no bound. Null means 0.2, 0.0003 for gspo, 0.33 (a log-ratio of
    -0.4) for gmpo and 1 for cispo."""
    clip_high: float | None = Field(None, gt=0)
    """The ratio is clipped above at 1 + clip_high. Null means 0.2, 0.0004 for gspo, and 0.49 (0.4) for gmpo."""
    dual_clip: float | None = Field(None, gt=1)
    """The loss of a token with a negative advantage is at most this times the advantage's size, however likely the
    token became; for `ppo` and `gspo`."""
    gate_positive: float = Field(1.0, gt=0)
    """How steeply the gate of `sapo` closes where the advantage is positive."""
    gate_negative: float = Field(1.05, gt=0)
    """How steeply it closes where the advantage is negative."""
    max_second_moment: float = Field(0.04, gt=0)
    """For `m2po`: the tokens with the largest squared log-ratio are left out of an update until the mean square of the
    others is at most this."""
    aggregation: Literal["token_mean", "response_mean", "constant"] = "token_mean"
    """Mean over the tokens of the update; over its responses, of the mean over the tokens of each; or the sum over
    tokens divided by the responses and by `divisor`, which does not depend on lengths."""
    divisor: float | None = Field(None, gt=0)
    """Tokens per response that `aggregation: constant` divides by; null means rollout.max_new_tokens."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus: the entropy of the next-token distribution at the temperature, at each token."""
    behaviour_weight: Literal["none", "truncated", "masked"] = "none"
    """Weigh each token by how much likelier the policy held it at the step's start than the sampler in bf16 did; a
    weight beyond `behaviour_cap` or `behaviour_floor` is cut to it (`truncated`), or is 0 (`masked`)."""
    behaviour_cap: float = Field(2.0, ge=1)
    """The largest of these weights."""
    behaviour_floor: float = Field(0.0, ge=0, le=1)
    """The smallest of them; 0 is no bound."""
    behaviour_of: Literal["token", "response"] = "token"
    """The weight of each token by itself, or that of a whole response, the product over its tokens, for all of them."""
    rejection: RejectionConfig | None = None
    """Leave out of the policy's updates what the sampler drew too far from the policy; null keeps all."""

    @property
    def asks_the_sampler(self) -> bool:
        """True where the sampler's log-probs are read beside those of the step's start."""
        return self.behaviour_weight != "none" or self.rejection is not None

    @property
    def clips(self) -> tuple[float, float]:
        """`clip_low` and `clip_high` with their defaults resolved."""
        low, high = CLIPS[self.objective]
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @model_validator(mode="after")
    def _bounded_once(self) -> Self:
        if self.dual_clip is not None and self.objective not in ("ppo", "gspo"):
            raise ValueError(
                f"dual_clip bounds what the clip of ppo and gspo leaves open; {self.objective} bounds it already: "
                "leave dual_clip out"
            )
        return self


class ValueLossConfig(Section):
    """What the value model minimises."""

    kind: Literal["squared", "huber", "smooth_l1"] = "squared"
    """Half the squared error; the same up to an error of `huber_delta` and linear beyond (`huber`); or `smooth_l1`,
    which is `huber` with a delta of 1."""
    huber_delta: float = Field(10.0, gt=0)
    """The error from which `huber` is linear, in units of the score."""
    coefficient: float | None = Field(None, gt=0)
    """Weight of the value loss beside the policy loss where both train one trunk (`value.init_from: trunk`); null means
    0.1. A value model of its own has its own optimizer instead."""
    clip: float | None = Field(0.2, gt=0)
    """New values may move this far from the old ones before their loss is clipped; null does not clip. Where values are
    normalised it counts in standard deviations of the returns."""
    normalise: Literal["none", "exponential", "cumulative"] = "none"
    """The value model learns returns divided by their running standard deviation, and its last layer is rescaled when
    that moves, so that no value changes (PopArt). `exponential` forgets, `cumulative` weighs all returns alike."""
    normalise_decay: float = Field(0.99, ge=0, lt=1)
    """What the returns of earlier steps weigh after each further step, where `normalise` is `exponential`; AReaL has
    0.99995."""

    @property
    def weight(self) -> float:
        """`coefficient` with its default resolved."""
        return 0.1 if self.coefficient is None else self.coefficient

    @property
    def delta(self) -> float | None:
        """The error from which the loss is linear; None where it never is."""
        return {"squared": None, "huber": self.huber_delta, "smooth_l1": 1.0}[self.kind]


class GuardConfig(Section):
    """When an update is skipped, and when the run stops."""

    max_ratio: float | None = Field(None, gt=1)
    """A minibatch whose mean ratio exceeds this is skipped before the optimizer sees it."""
    max_kl: float | None = Field(None, gt=0)
    """A minibatch whose KL from the step's start (k3 per token) exceeds this is skipped likewise."""
    target_kl: float | None = Field(None, gt=0)
    """The first minibatch whose KL from the step's start (k3 per token) exceeds this ends the policy's updates of the
    step, itself included; those of a value model of its own go on."""
    max_skipped_fraction: float = Field(0.5, gt=0, le=1)
    """The run stops when more than this fraction of the updates of a step is skipped."""
    max_unscored_fraction: float = Field(0.2, ge=0, le=1)
    """The run stops when more than this fraction of a batch could not be scored; of an evaluation as well."""
    max_constant_reward_steps: int | None = Field(None, ge=2)
    """The run stops when all scores of this many steps in a row are one and the same number: a verifier that is dead,
    or nothing left to learn; null goes on. 5 or more for verifiers that say right or wrong. docs/rewards.md."""
