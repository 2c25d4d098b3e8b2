"""Guards of updates: which are skipped, what ends a step or the run, and whether sampler and learner agree at first."""

import warnings
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Generic, TypeVar

from proximo.algorithms.losses import PolicyStatistics
from proximo.config.ppo.objectives import ObjectiveConfig
from proximo.config.ppo.options import GuardConfig, PPOConfig
from proximo.errors import TrainingError
from proximo.learner.update import UpdateResult
from proximo.metrics.values import Max, Mean, MetricValue
from proximo.records import Experience

Statistics = TypeVar("Statistics")
FIRST_MINIBATCH_LIMITS = {
    "float32": {"max_abs_log_ratio": 1e-3, "mean_abs_log_ratio": 1e-5},
    "tf32": {"mean_abs_log_ratio": 0.005, "clip_fraction": 0.01},
    "bf16": {"mean_abs_log_ratio": 0.02, "clip_fraction": 0.01},
    "bf16_float32_head": {"mean_abs_log_ratio": 0.02, "clip_fraction": 0.01},
}
"""Precision -> limits of the first minibatch, where the ratio is 1 up to rounding. Exceeding one is a warning, tenfold
it stops the run."""


class PolicyGuard(Generic[Statistics]):
    """The guard of the updates of one step. At the first update it may stop the run, before anything was trained."""

    def __init__(
        self,
        config: GuardConfig,
        of_policy: Callable[[Statistics], PolicyStatistics],
        check_first: Callable[[PolicyStatistics], None],
    ) -> None:
        """`of_policy`: extracts policy statistics from those of a micro-batch. `check_first`: called with the
        statistics of the step's first minibatch; it may raise.
        """
        self._config = config
        self._of_policy = of_policy
        self._check_first = check_first
        self._is_first = True

    def refusal(self, parts: Sequence[Statistics]) -> str | None:
        """Why to skip the update of these micro-batches; None to take it."""
        total, config = self._total(parts), self._config
        if self._is_first:
            self._check_first(total)
        self._is_first = False
        ratio, divergence = (total.ratio / total.num_tokens).item(), _divergence(total)
        moved = f"the KL from the step's start is {divergence:.3g} per token, above"
        if config.target_kl is not None and divergence > config.target_kl:
            return f"{moved} ppo.guards.target_kl = {config.target_kl:g}: the updates of this step end here"
        if config.max_ratio is not None and ratio > config.max_ratio:
            return f"the mean ratio is {ratio:.3g}, above ppo.guards.max_ratio = {config.max_ratio:g}"
        if config.max_kl is not None and divergence > config.max_kl:
            return f"{moved} ppo.guards.max_kl = {config.max_kl:g}"
        return None

    def ends(self, parts: Sequence[Statistics]) -> bool:
        """Whether the KL exceeds `target_kl`, which ends the step before this update.

        The KL is k3: unlike the mean of log-ratios, it is never negative.
        """
        target = self._config.target_kl
        return target is not None and _divergence(self._total(parts)) > target

    def _total(self, parts: Sequence[Statistics]) -> PolicyStatistics:
        return reduce(add, (self._of_policy(part) for part in parts))


def _divergence(total: PolicyStatistics) -> float:
    """Mean k3 per token, in nats."""
    return (total.k3 / total.num_tokens).item()


def too_many_skipped(results: Sequence[UpdateResult], config: PPOConfig, *, role: str, step: int) -> str | None:
    """Why the run ends after this step: more than `guards.max_skipped_fraction` of the updates were skipped. Else None.

    `step` counts from 0.
    """
    skipped = [result.refusal for result in results if result.refusal]
    limit = config.guards.max_skipped_fraction
    if len(skipped) <= limit * len(results):
        return None
    return (
        f"step {step + 1}: {len(skipped)} of {len(results)} updates of the {role} were skipped, more than "
        f"ppo.guards.max_skipped_fraction = {limit:g} allows; the last reason: {skipped[-1]}"
    )


def first_minibatch(total: PolicyStatistics) -> dict[str, MetricValue]:
    """Differences between learner and sampler before the first update of a step. All should be 0."""
    count = total.num_tokens.item()
    return {
        "max_abs_log_ratio": Max(total.max_abs_log_ratio.item()),
        "mean_abs_log_ratio": Mean(total.abs_log_ratio.item(), count),
        "clip_fraction": Mean(total.clipped.item(), count),
    }


def broken_limits(
    statistics: PolicyStatistics, *, precision: str, objective: ObjectiveConfig
) -> list[tuple[str, float, float]]:
    """(name, value, limit) of every limit that the first minibatch exceeds.

    The clip fraction is not checked for an objective whose clip range is narrower than rounding errors in bf16.
    """
    measured = {name: metric.value or 0.0 for name, metric in first_minibatch(statistics).items()}
    limits = dict(FIRST_MINIBATCH_LIMITS[precision])
    if not objective.clip_is_wider_than_rounding:
        limits.pop("clip_fraction", None)
    # Negated, so that NaN counts as exceeding the limit.
    return [(name, measured[name], limit) for name, limit in limits.items() if not measured[name] <= limit]


def likely_causes(experience: Experience, *, policy_version: int) -> str:
    """Likely causes of log-probs that differ from those of the policy at `policy_version`, for a message."""
    versions = sorted({scored.response.policy_version for scored in experience.scored} - {policy_version})
    if not versions:
        return (
            "likely causes: a model with dropout or state, weights changed from outside, or responses of another model"
        )
    named = ", ".join(map(str, versions[:4]))
    return (
        f"the responses are of policy version {named}, and the policy is at version {policy_version} by now: responses "
        "serve one step, so generate new ones for each"
    )


def check_first_minibatch(
    statistics: PolicyStatistics, *, precision: str, objective: ObjectiveConfig, causes: str, step: int
) -> None:
    """Warn if the learner's log-probs differ from the sampler's by more than a limit.

    Raises TrainingError beyond ten times a limit.
    """
    for name, value, limit in broken_limits(statistics, precision=precision, objective=objective):
        message = (
            f"step {step}: the first minibatch has {name} = {value:.3g}, at most {limit:g} is right in {precision}. "
            f"Nothing was learned yet, so sampler and learner disagree: {causes}"
        )
        if not value <= 10 * limit:
            raise TrainingError(message)
        warnings.warn(message, stacklevel=2)
