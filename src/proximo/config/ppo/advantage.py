"""Config section `ppo.advantage`: the estimator and its parameters. The formulas: algorithms/."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from proximo.config.schema.base import Section


class AdvantageConfig(Section):
    """How advantages are estimated: with a critic, or by comparing responses."""

    estimator: Literal[
        "gae",
        "group_centred",
        "group_standardised",
        "leave_one_out",
        "length_weighted",
        "pass_at_k",
        "group_return_to_go",
        "return_to_go",
        "greedy_baseline",
    ] = "gae"
    """`gae` trains a value model; the others need no critic. `group_centred` (Dr. GRPO), `group_standardised` (GRPO),
    `leave_one_out` (RLOO), `length_weighted` (OPO), `pass_at_k` (PKPO) and `group_return_to_go` (REINFORCE++ with a
    baseline) compare the responses to one prompt. `return_to_go` (REINFORCE++) compares those of the whole step, and
    `greedy_baseline` (ReMax) compares each response with an additional greedy one; both need only one response per
    prompt."""
    k: int = Field(2, ge=2)
    """For `pass_at_k`: the k of pass@k, whose expected best score is maximised."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token, for `gae` and the returns to go."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Lambda of the advantages (GAE)."""
    length_adaptive: float | None = Field(None, gt=0)
    """Alpha of a length-dependent lambda that replaces `gae_lambda`: 1 - 1 / (alpha * tokens), at least 0 (VAPO uses
    0.05); null uses `gae_lambda` for all."""
    value_gae_lambda: float | None = Field(None, ge=0, le=1)
    """Lambda for the returns of the value model (VAPO uses 1); null uses that of the advantages."""
    standardise: bool | Literal["group"] | None = None
    """Standardise advantages to mean 0 and variance 1 over the valid tokens of the step, or with `group` over those of
    each prompt's responses; null standardises over the step for `gae` and the returns to go, and not for the others.
    Not with `pass_at_k`, whose advantages are never negative."""
    unbiased_variance: bool = False
    """Divide the variance, in standardising and in `score.whiten_rewards`, by the number of tokens minus 1."""

    least_spread: float | None = Field(0.01, ge=0)
    """With `gae`: do not train the policy on a step whose returns have at most this fraction of the standard deviation
    of all returns of the run, because its advantages are the critic's noise; null trains on every step."""
    zero_variance_groups: Literal["keep", "exclude", "resample"] = "keep"
    """Treatment of groups in which all responses have the same `ppo.task_reward`: `exclude` removes them from the loss
    and its denominator, so that neither shaping nor the KL trains on them; `resample` also samples further prompts in
    their place (DAPO's dynamic sampling). Not with `gae`, `return_to_go` and `greedy_baseline`."""
    resample_rounds: int = Field(4, ge=2)
    """With `resample`, most rollouts of one step, each of `prompts_per_step` prompts. What is missing after them is
    filled up with groups of zero variance, which train nothing."""

    @property
    def excludes_zero_variance(self) -> bool:
        """Whether groups of zero variance are left out of the loss."""
        return self.zero_variance_groups != "keep"

    @model_validator(mode="after")
    def _has_groups(self) -> Self:
        if self.excludes_zero_variance and not self.compares_groups:
            raise ValueError(
                f"zero_variance_groups: {self.zero_variance_groups} works with estimators that compare the responses "
                f"to one prompt; with {self.estimator} such prompts train the policy too: set it to keep"
            )
        return self

    @model_validator(mode="after")
    def _keeps_its_sign(self) -> Self:
        if self.standardise and self.estimator == "pass_at_k":
            raise ValueError(
                "standardise would penalise the responses that add nothing to the best of k, whose advantage is "
                "0 in pass_at_k: remove it"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _estimator_alone(cls, data: Any) -> Any:
        return {"estimator": data} if isinstance(data, str) else data

    @property
    def uses_critic(self) -> bool:
        """True if a value model is trained."""
        return self.estimator == "gae"

    @property
    def compares_groups(self) -> bool:
        """True if the baseline is computed from the responses to one prompt."""
        return self.estimator not in ("gae", "return_to_go", "greedy_baseline")

    @property
    def is_per_token(self) -> bool:
        """True if advantages differ between the tokens of a response, because each counts only later rewards."""
        return self.estimator in ("gae", "return_to_go", "group_return_to_go", "greedy_baseline")

    @property
    def standardises(self) -> bool | Literal["group"]:
        """`standardise` with its default resolved."""
        by_default = self.is_per_token and self.estimator != "greedy_baseline"
        return by_default if self.standardise is None else self.standardise
