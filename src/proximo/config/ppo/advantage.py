"""Config sections `ppo.advantage`: one for each estimator, with what it needs and its formula (in algorithms/).

A new estimator is a section here, in `Advantage`, and its formula in algorithms/.
"""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, WrapValidator

from proximo.config.schema.base import Section
from proximo.config.schema.own_sections import taking_own

if TYPE_CHECKING:
    from torch import Tensor

    from proximo.algorithms.advantages import StepRewards


class AdvantageConfig(Section):
    """What all estimators have in common. Of a subclass of yours, `kind` in a recipe is `package.module:Class`."""

    takes_own: ClassVar[bool] = True
    kind: str = "own"
    """The name of the estimator."""
    needs_critic: ClassVar[bool] = False
    """Whether a value model is trained; `estimate` then also gives its targets."""
    needs_groups: ClassVar[bool] = False
    """Whether the baseline is computed from the responses to one prompt."""
    needs_greedy: ClassVar[bool] = False
    """Whether each prompt also gets a greedy response, whose score is subtracted from the others'."""
    is_per_token: ClassVar[bool] = False
    """Whether advantages differ between the tokens of a response, because each counts only later rewards."""
    ranks_pairs: ClassVar[bool] = False
    """Whether, before standardising, the better of two responses has a positive advantage, the worse its opposite."""
    formula_path: ClassVar[str]
    """Where the formula is, as `module:function`."""
    standardise: bool | Literal["group"] = False
    """Standardise advantages to mean 0 and variance 1 over the valid tokens of the step, or with `group` over those of
    each prompt's responses."""
    unbiased_variance: bool = False
    """Divide the variance, in standardising and in `score.whiten_rewards`, by the number of tokens minus 1."""

    @property
    def formula(self) -> Callable[..., Any]:
        """The function that the estimator is. Loads torch."""
        return resolve_name(self.formula_path)

    def estimate(self, step: "StepRewards") -> "tuple[Tensor, Tensor | None]":
        """Advantages [T] before standardising, and returns [T], the targets of a value model; None without one.

        Every kind has its own; this one raises NotImplementedError.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method `estimate`")

    def problem(self, responses_per_prompt: int) -> str | None:
        """Why the estimator does not work with so many responses to a prompt; None if it does."""
        if self.needs_groups and responses_per_prompt < 2:
            return (
                f"advantage {self.kind} compares responses: responses_per_prompt must be 2 or more; gae, "
                "return_to_go and greedy_baseline need only one"
            )
        if self.standardise == "group" and responses_per_prompt < 2:
            return (
                "advantage.standardise: group needs groups: set responses_per_prompt to 2 or more, or use true to "
                "standardise over the step"
            )
        return None

    @property
    def discount(self) -> float:
        """Discount of a return per token."""
        return 1.0

    @property
    def least_relative_spread(self) -> float | None:
        """A step whose returns have no larger fraction of the run's deviation does not train the policy."""
        return None

    @property
    def excludes_zero_variance(self) -> bool:
        """Whether groups of zero variance are left out of the loss."""
        return False

    @property
    def most_rollouts(self) -> int:
        """Largest number of rollouts of one step; more than 1 to replace groups of zero variance."""
        return 1


class DiscountedConfig(AdvantageConfig):
    """What the estimators of single tokens have in common. By default they are the returns to go."""

    is_per_token: ClassVar[bool] = True
    formula_path: ClassVar[str] = "proximo.algorithms.advantages:returns_to_go"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    standardise: bool | Literal["group"] = True
    """Standardise advantages to mean 0 and variance 1 over the valid tokens of the step, or with `group` over those of
    each prompt's responses."""

    @property
    def discount(self) -> float:
        """The discount per token, from 0 to 1: the key `gamma`."""
        return self.gamma

    def estimate(self, step: "StepRewards") -> "tuple[Tensor, Tensor | None]":
        """The formula of the rewards of each token. There is no value model, so no returns."""
        return self.formula(step.rewards, step.mask, step.lengths, gamma=self.gamma), None


class GAEConfig(DiscountedConfig):
    """Generalised advantage estimation with a value model (arXiv:1506.02438)."""

    needs_critic: ClassVar[bool] = True
    formula_path: ClassVar[str] = "proximo.algorithms.advantages:gae_with_lambdas"
    kind: Literal["gae"] = "gae"
    """PPO with a critic."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Lambda of the advantages."""
    length_adaptive: float | None = Field(None, gt=0)
    """Alpha of a length-dependent lambda that replaces `gae_lambda`: 1 - 1 / (alpha * tokens), at least 0; null uses
    `gae_lambda` for all. For long chains of thought: VAPO uses 0.05."""
    value_gae_lambda: float | None = Field(None, ge=0, le=1)
    """Lambda for the returns of the value model; null uses that of the advantages. For long chains of thought, in which
    a reward at the end would hardly reach the first values: VC-PPO (arXiv:2503.01491) and VAPO use 1."""
    least_spread: float | None = Field(0.01, ge=0)
    """Do not train the policy on a step whose returns have at most this fraction of the standard deviation of all
    returns of the run, because its advantages are the critic's noise; null trains on every step."""

    @property
    def least_relative_spread(self) -> float | None:
        """The share of the run's spread below which a step does not train: the key `least_spread`."""
        return self.least_spread

    def estimate(self, step: "StepRewards") -> "tuple[Tensor, Tensor | None]":
        """Advantages and returns by the values of the critic. Raises ValueError without them."""
        lambdas = self.model_dump(include={"gamma", "gae_lambda", "length_adaptive", "value_gae_lambda"})
        return self.formula(step, **lambdas)


class ReturnToGoConfig(DiscountedConfig):
    """The rewards of a token and of those after it (REINFORCE++, arXiv:2501.03262)."""

    kind: Literal["return_to_go"] = "return_to_go"
    """No critic and no groups: standardising compares the responses of the step."""


class GreedyBaselineConfig(DiscountedConfig):
    """The return to go of the score minus that of a greedy response (ReMax, arXiv:2310.10505)."""

    needs_greedy: ClassVar[bool] = True
    kind: Literal["greedy_baseline"] = "greedy_baseline"
    """Compares each response with an additional greedy one; one response per prompt is enough."""
    standardise: bool | Literal["group"] = False
    """Standardise advantages to mean 0 and variance 1 over the valid tokens of the step, or with `group` over those of
    each prompt's responses."""


class GroupAdvantageConfig(AdvantageConfig):
    """What the estimators have in common that compare the whole returns of the responses to a prompt.

    The formula is given returns [R], group of each response [R], whether it counts [R], and `options`; it gives [R].
    """

    needs_groups: ClassVar[bool] = True
    zero_variance_groups: Literal["keep", "exclude", "resample"] = "keep"
    """Treatment of groups in which all responses have the same `ppo.task_reward`: `exclude` removes them from the loss
    and its denominator, so that neither shaping nor the KL trains on them; `resample` also samples further prompts in
    their place (DAPO's dynamic sampling)."""
    resample_rounds: int = Field(4, ge=2)
    """With `resample`, most rollouts of one step, each of `prompts_per_step` prompts. What is missing after them is
    filled up with groups of zero variance, which train nothing. For tasks of which most prompts are solved always or
    never."""

    @property
    def excludes_zero_variance(self) -> bool:
        """Whether groups of zero variance are left out of the loss."""
        return self.zero_variance_groups != "keep"

    @property
    def most_rollouts(self) -> int:
        """`resample_rounds`, if groups are resampled."""
        return self.resample_rounds if self.zero_variance_groups == "resample" else 1

    def options(self, step: "StepRewards") -> dict[str, Any]:
        """Further arguments of the formula."""
        del step
        return {}

    def estimate(self, step: "StepRewards") -> "tuple[Tensor, Tensor | None]":
        """One advantage for all tokens of a response, by its group. There are no returns."""
        given = step.whole_returns, step.group_ids, step.counted
        return step.to_tokens(self.formula(*given, **self.options(step))), None


class GroupCentredConfig(GroupAdvantageConfig):
    """The return minus the mean of its group (Dr. GRPO, arXiv:2503.20783)."""

    ranks_pairs: ClassVar[bool] = True
    formula_path: ClassVar[str] = "proximo.algorithms.group_baselines:group_centred"
    kind: Literal["group_centred"] = "group_centred"
    """Prompts with a larger spread of scores count for more."""


class GroupStandardisedConfig(GroupAdvantageConfig):
    """The return minus the mean of its group, divided by the group's deviation (GRPO, arXiv:2402.03300)."""

    formula_path: ClassVar[str] = "proximo.algorithms.group_baselines:group_standardised"
    kind: Literal["group_standardised"] = "group_standardised"
    """All prompts whose scores differ count alike."""


class LeaveOneOutConfig(GroupAdvantageConfig):
    """The return minus the mean of the others of its group (RLOO, arXiv:2402.14740)."""

    formula_path: ClassVar[str] = "proximo.algorithms.group_baselines:leave_one_out"
    kind: Literal["leave_one_out"] = "leave_one_out"
    """The baseline is unbiased."""


class LengthWeightedConfig(GroupAdvantageConfig):
    """The return minus the mean over the tokens of its group (OPO, arXiv:2505.23585)."""

    formula_path: ClassVar[str] = "proximo.algorithms.group_baselines:length_weighted"
    kind: Literal["length_weighted"] = "length_weighted"
    """Long responses count for more in the baseline."""

    def options(self, step: "StepRewards") -> dict[str, Any]:
        """Tokens of each response."""
        return {"num_tokens": step.num_tokens}


class PassAtKConfig(GroupAdvantageConfig):
    """What a response adds to the best of k (PKPO, arXiv:2505.15201)."""

    formula_path: ClassVar[str] = "proximo.algorithms.group_baselines:pass_at_k"
    kind: Literal["pass_at_k"] = "pass_at_k"
    """Maximises the expected best score of `k` responses."""
    k: int = Field(2, ge=2)
    """The k of pass@k."""
    standardise: Literal[False] = False
    """Never: it would penalise the responses that add nothing to the best of k, whose advantage is 0."""

    def problem(self, responses_per_prompt: int) -> str | None:
        """Why the estimator does not work with so many responses: also if they are fewer than `k`."""
        if responses_per_prompt >= 2 and responses_per_prompt < self.k:
            return f"advantage.k ({self.k}) must be at most responses_per_prompt ({responses_per_prompt})"
        return super().problem(responses_per_prompt)

    def options(self, step: "StepRewards") -> dict[str, Any]:
        """The number of samples `k`."""
        del step
        return {"k": self.k}


class GroupReturnToGoConfig(DiscountedConfig, GroupAdvantageConfig):
    """The return to go minus the mean return of its group (REINFORCE++ with a baseline, arXiv:2501.03262)."""

    formula_path: ClassVar[str] = "proximo.algorithms.group_baselines:group_returns_to_go"
    kind: Literal["group_return_to_go"] = "group_return_to_go"
    """Each token counts only the rewards from it on."""

    def estimate(self, step: "StepRewards") -> "tuple[Tensor, Tensor | None]":
        """Advantages of tokens by the rewards from each on, and by its group. There are no returns."""
        given = step.rewards, step.group_ids, step.counted, step.mask, step.lengths
        return self.formula(*given, gamma=self.gamma), None


Advantage = SerializeAsAny[
    Annotated[
        GAEConfig
        | GroupCentredConfig
        | GroupStandardisedConfig
        | LeaveOneOutConfig
        | LengthWeightedConfig
        | PassAtKConfig
        | GroupReturnToGoConfig
        | ReturnToGoConfig
        | GreedyBaselineConfig,
        Field(discriminator="kind"),
        WrapValidator(taking_own(AdvantageConfig)),
    ]
]
"""All estimators, the default first."""
