"""Config sections of PPO's policy loss, value loss, loss on texts and update guards."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from proximo.config.ppo.objectives import Objective, PPOObjectiveConfig
from proximo.config.schema.base import Section


class RejectionConfig(Section):
    """What all kinds of rejection have in common."""

    denominator: Literal["kept", "all"] = "kept"
    """`kept`: the policy's loss is a mean over the tokens that are kept. `all`: rejected tokens have an objective of 0
    and go on counting in the mean, and in a KL in the loss and the entropy bonus, as in OpenRLHF and AReaL."""


class DivergenceRejectionConfig(RejectionConfig):
    """Rejects tokens or responses on which sampler and policy (at the step's start) differ too much, in nats."""

    kind: Literal["divergence"]
    """A limit on an estimate of the divergence, the same in both directions for `k1`."""
    estimator: Literal["k1", "k2", "k3", "k3_reverse"] = "k1"
    """Divergence of the sampler from the policy at a token, in nats; for k1, the log-ratio, its absolute value.
    `k3_reverse` is k3 with the two exchanged, AReaL's `kl_k3`."""
    over: Literal["token", "mean", "sum", "max"] = "token"
    """Reject single tokens, or whole responses by the mean, sum or maximum over their tokens. The mean of k1 is the
    log of the geometric mean of the ratios."""
    limit: float = Field(gt=0)
    """Reject above this divergence, in nats."""


class RatioRejectionConfig(RejectionConfig):
    """Rejects tokens or responses whose ratio of the policy (at the step's start) to the sampler is out of bounds."""

    kind: Literal["ratio"]
    """Two bounds on the ratio, each with its own direction."""
    over: Literal["token", "geometric_mean", "product", "max"] = "geometric_mean"
    """Reject single tokens, or whole responses by the geometric mean, the product or the maximum of the ratios of their
    tokens."""
    lower: float = Field(0.0, ge=0, le=1)
    """Reject below this ratio; 0 means no bound."""
    upper: float = Field(gt=1)
    """Reject above this ratio."""


class BehaviourWeightConfig(Section):
    """Weights each token by the ratio of the policy, at the step's start, to the sampler."""

    cap: float | None = Field(2.0, ge=1)
    """Upper bound of the weights; null means no bound."""
    floor: float = Field(0.0, ge=0, le=1)
    """Lower bound of the weights; 0 means no bound."""
    of: Literal["token", "response", "geometric_mean"] = "token"
    """Use the weight of each single token, or for all tokens the weight of the response, which is the product over its
    tokens, or their geometric mean."""

    @property
    def highest(self) -> float:
        """`cap`, infinite for null."""
        return math.inf if self.cap is None else self.cap


class TruncatedWeightConfig(BehaviourWeightConfig):
    """Weights that are clipped to their bounds."""

    is_masked: ClassVar[bool] = False

    kind: Literal["truncated"] = "truncated"
    """A weight outside `floor` to `cap` is set to the bound (arXiv:1802.01561)."""


class MaskedWeightConfig(BehaviourWeightConfig):
    """Weights that are 0 outside their bounds."""

    is_masked: ClassVar[bool] = True

    kind: Literal["masked"] = "masked"
    """A weight outside `floor` to `cap` is set to 0 (IcePop)."""


class TokenMeanConfig(Section):
    """A mean over the tokens of the update."""

    weighs_tokens: ClassVar[bool] = True
    """Whether an update counts in the mean over updates with its tokens, or else with its responses."""

    kind: Literal["token_mean"] = "token_mean"
    """Long responses count for more."""


class ResponseMeanConfig(Section):
    """A mean over the responses of the update of the mean over their tokens."""

    weighs_tokens: ClassVar[bool] = False

    kind: Literal["response_mean"] = "response_mean"
    """Each response counts alike."""


class ConstantDivisorConfig(Section):
    """The sum over tokens, divided by the number of responses and by a constant."""

    weighs_tokens: ClassVar[bool] = False

    kind: Literal["constant"] = "constant"
    """The weight of a token does not depend on lengths (Dr. GRPO)."""
    divisor: float | None = Field(None, gt=0)
    """Tokens per response; null means rollout.max_new_tokens. For runs with other limits that are to share a learning
    rate."""


class PolicyLossConfig(Section):
    """The policy loss: objective, aggregation, and corrections for another sampler."""

    objective: Objective = PPOObjectiveConfig()
    """What is minimised on each token. A name alone is its kind: `objective: sapo`."""
    aggregation: Annotated[
        TokenMeanConfig | ResponseMeanConfig | ConstantDivisorConfig, Field(discriminator="kind")
    ] = TokenMeanConfig()
    """How the losses of tokens become that of an update. A name alone is its kind."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus: the entropy of the next-token distribution at the temperature, at each token."""
    behaviour_weight: Annotated[TruncatedWeightConfig | MaskedWeightConfig, Field(discriminator="kind")] | None = None
    """Correct for another sampler, by weights of tokens; null does not. A name alone is its kind."""
    rejection: Annotated[DivergenceRejectionConfig | RatioRejectionConfig, Field(discriminator="kind")] | None = None
    """Reject tokens or responses on which sampler and policy differ too much; null keeps all."""


class SquaredErrorConfig(Section):
    """Half the squared error."""

    delta: ClassVar[float | None] = None

    kind: Literal["squared"] = "squared"
    """Outliers pull in proportion to their error."""


class HuberConfig(Section):
    """Half the squared error, linear beyond an error of `delta`."""

    kind: Literal["huber"] = "huber"
    """An outlier pulls no harder than an error of `delta`."""
    delta: float = Field(10.0, gt=0)
    """The error beyond which the loss is linear, in units of the score. Lower it for scores of a smaller scale."""


class SmoothL1Config(Section):
    """Huber with a delta of 1."""

    delta: ClassVar[float | None] = 1.0

    kind: Literal["smooth_l1"] = "smooth_l1"
    """As torch's smooth L1 loss."""


class ExponentialScaleConfig(Section):
    """The scale of the returns, which forgets old ones."""

    kind: Literal["exponential"] = "exponential"
    """A moving mean and variance."""
    decay: float = Field(0.99, ge=0, lt=1)
    """Weight of earlier returns after each further step; AReaL uses 0.99995."""


class CumulativeScaleConfig(Section):
    """The scale of all returns of the run."""

    kind: Literal["cumulative"] = "cumulative"
    """All returns have the same weight."""


class ValueLossConfig(Section):
    """The value loss: its form, its clip, and the scale of the returns."""

    error: Annotated[SquaredErrorConfig | HuberConfig | SmoothL1Config, Field(discriminator="kind")] = (
        SquaredErrorConfig()
    )
    """The loss of an error. A name alone is its kind."""
    coefficient: float | None = Field(None, gt=0)
    """Weight of the value loss beside the policy loss on a shared trunk (`value.init_from: trunk`); null means 0.1. A
    separate value model has its own optimizer instead."""
    clip: float | None = Field(0.2, gt=0)
    """Clip range of new values around the old ones; null does not clip. With normalised values, in standard deviations
    of the returns."""
    normalise: Annotated[ExponentialScaleConfig | CumulativeScaleConfig, Field(discriminator="kind")] | None = None
    """Train the value model on returns divided by their running standard deviation; null does not. When the deviation
    changes, the last layer is rescaled so that no value changes (PopArt). A name alone is its kind."""

    @property
    def weight(self) -> float:
        """`coefficient` with its default resolved."""
        return 0.1 if self.coefficient is None else self.coefficient


class GuardConfig(Section):
    """Conditions that skip an update or stop the run."""

    max_ratio: float | None = Field(None, gt=1)
    """Skip a minibatch whose mean ratio exceeds this, before the optimizer step."""
    max_kl: float | None = Field(None, gt=0)
    """Skip a minibatch whose KL from the step's start (k3 per token) exceeds this."""
    target_kl: float | None = Field(None, gt=0)
    """End the policy's updates of a step at the first minibatch whose KL from the step's start (k3 per token) exceeds
    this, without updating on it; a separate value model continues."""
    max_skipped_fraction: float = Field(0.5, gt=0, le=1)
    """Stop the run if more than this fraction of the updates of a step is skipped. Raise it where `max_ratio` or
    `max_kl` are to act often."""
    max_mismatch: float | None = Field(0.2, gt=0)
    """Stop the run, before anything of the step is trained, if the log-probs of the engine that sampled differ from the
    learner's by more than this many nats per token (mean absolute difference), beyond what `rollout.staleness`
    explains; null disables the check. Ten times what bf16 explains. docs/rollout.md, "When engine and learner
    differ"."""
    max_unscored_fraction: float = Field(0.2, ge=0, le=1)
    """Stop the run if more than this fraction of a batch, or of an evaluation, could not be scored. Raise it for a
    service that often fails."""
    max_constant_reward_steps: int | None = Field(None, ge=2)
    """Stop the run if all scores of this many consecutive steps are one number: the verifier is down, or nothing is
    left to learn; null disables the check. Use 5 or more for binary verifiers. docs/rewards.md."""


ENDING_GUARDS = ("max_mismatch", "max_skipped_fraction", "max_unscored_fraction", "max_constant_reward_steps")
"""Guards that only decide whether the run ends: they may change on resume."""


class PTXConfig(Section):
    """Loss on texts in every update of the policy, which preserves earlier abilities."""

    coefficient: float = Field(gt=0)
    """Weight of the mean token loss of the texts beside the policy loss, which is a mean over tokens too."""
    examples_per_update: int = Field(8, ge=1)
    """Texts that join each update. For texts much shorter or longer than the responses."""
