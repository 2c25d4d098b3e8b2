"""What the updates of a step did, gathered and made metrics of. Takes no update: see updates.py."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from proximo.algorithms.losses import PolicyStatistics
from proximo.learner.update import UpdateResult
from proximo.metrics.values import Last, Max, Mean, MetricValue, Sum

Statistics = TypeVar("Statistics")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What the updates of one step did to one model."""

    metrics: dict[str, MetricValue]
    refusals: tuple[str, ...]
    """Why updates were skipped, one entry each; the last may be why the step's updates ended."""
    first_minibatch: PolicyStatistics | None = None
    share_trained: float = 1.0
    """Of the updates that were planned, those whose gradient was computed; below 1 where target_kl ended them."""


@dataclass(kw_only=True, slots=True)
class Taken(Generic[Statistics]):
    """The updates of one step: those that were tried, with the counts of their minibatches."""

    num_planned: int
    results: list[UpdateResult[Statistics]] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_responses: list[int] = field(default_factory=list)
    ended: bool = False
    """The last result is the update that was not taken because the step ended before it."""

    @property
    def whole(self) -> list[UpdateResult[Statistics]]:
        """Those that were taken or skipped one by one."""
        return self.results[:-1] if self.ended else self.results

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why updates were not taken, one entry each."""
        return tuple(result.refusal for result in self.results if result.refusal)


AT_REST: dict[str, MetricValue] = {
    "policy/loss": Mean(0.0, 1),
    "policy/clip_fraction": Mean(0.0, 1),
    "policy/ratio_mean": Mean(1.0, 1),
    "policy/approx_kl": Mean(0.0, 1),
    "policy/skipped_updates": Sum(0),
}
"""What a step without updates did to the policy."""


def policy_metrics(total: PolicyStatistics) -> dict[str, MetricValue]:
    """How far the policy moved, how many tokens were clipped, and how many tokens the others are worth."""
    count = total.num_tokens.item()
    return {
        "policy/clip_fraction": Mean(total.clipped.item(), count),
        "policy/ratio_mean": Mean(total.ratio.item(), count),
        "policy/effective_sample_size": Mean(total.ratio.item() ** 2, count * total.ratio_squared.item()),
        "policy/approx_kl": Mean(total.k3.item(), count),
    }


def update_metrics(role: str, taken: Taken, weights: Sequence[int]) -> dict[str, MetricValue]:
    """Loss, gradient, rate and skips of a role's updates. `weights`: how many of what each loss is the mean over."""
    applied = [(r, weight) for r, weight in zip(taken.results, weights, strict=True) if r.refusal is None]
    return {
        f"{role}/loss": Mean(sum(r.loss * weight for r, weight in applied), sum(weight for _, weight in applied)),
        f"{role}/gradient_norm": Mean.of(r.gradient_norm for r, _ in applied),
        f"{role}/learning_rate": Last((taken.whole or taken.results)[-1].learning_rate),
        f"{role}/skipped_updates": Sum(len(taken.whole) - len(applied)),
    }


def first_minibatch_metrics(total: PolicyStatistics) -> dict[str, MetricValue]:
    """How far the learner is from the sampler before anything was learned: numbers that should be 0."""
    count = total.num_tokens.item()
    return {
        "first_minibatch/max_abs_log_ratio": Max(total.max_abs_log_ratio.item()),
        "first_minibatch/mean_abs_log_ratio": Mean(total.abs_log_ratio.item(), count),
        "first_minibatch/clip_fraction": Mean(total.clipped.item(), count),
    }
