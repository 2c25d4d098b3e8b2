"""Collects the results of a step's updates and turns them into metrics."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from proximo.algorithms.losses import PolicyStatistics
from proximo.learner.update import UpdateResult
from proximo.metrics.values import Last, Max, Mean, MetricValue, Sum

Statistics = TypeVar("Statistics")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Metrics and skip reasons of one model's updates in a step."""

    metrics: dict[str, MetricValue]
    refusals: tuple[str, ...]
    """Reasons of skipped updates. The last entry may be why the step ended early."""
    guard: str | None = None
    """Why a guard ends the run after this step."""
    first_minibatch: PolicyStatistics | None = None
    share_trained: float = 1.0
    """Fraction of the planned updates whose gradient was computed; below 1 if target_kl ended the step."""


class TrunkReports(NamedTuple):
    """Reports of policy and value head that were trained together."""

    policy: Report
    value: Report


@dataclass(kw_only=True, slots=True)
class UpdateLog(Generic[Statistics]):
    """Results of the attempted updates of one step, with the sizes of their minibatches."""

    num_planned: int
    results: list[UpdateResult[Statistics]] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_responses: list[int] = field(default_factory=list)
    ended: bool = False
    """True if the last result is an update that was not taken because the step ended there."""

    @property
    def whole(self) -> list[UpdateResult[Statistics]]:
        """The results without the update that ended the step."""
        return self.results[:-1] if self.ended else self.results

    @property
    def refusals(self) -> tuple[str, ...]:
        """Reasons of all updates that were not taken."""
        return tuple(result.refusal for result in self.results if result.refusal)


AT_REST: dict[str, MetricValue] = {
    "policy/loss": Mean(0.0, 1),
    "policy/clip_fraction": Mean(0.0, 1),
    "policy/ratio_mean": Mean(1.0, 1),
    "policy/approx_kl": Mean(0.0, 1),
    "policy/skipped_updates": Sum(0),
}
"""Metrics of a step without policy updates."""


def policy_metrics(total: PolicyStatistics) -> dict[str, MetricValue]:
    """Clip fraction, mean ratio, effective sample size and KL of the policy updates."""
    count = total.num_tokens.item()
    return _other_metrics(total) | {
        "policy/clip_fraction": Mean(total.clipped.item(), count),
        "policy/ratio_mean": Mean(total.ratio.item(), count),
        "policy/effective_sample_size": Mean(total.ratio.item() ** 2, count * total.ratio_squared.item()),
        "policy/approx_kl": Mean(total.k3.item(), count),
    }


def _other_metrics(total: PolicyStatistics) -> dict[str, MetricValue]:
    """Metrics of what only some losses measure: the full KL, and pairs."""
    others = {name: value.item() for name, value in total.others.items()}
    if (num_pairs := others.pop("pairs", None)) is not None:
        means: dict[str, MetricValue] = {f"pairs/{name}": Mean(value, num_pairs) for name, value in others.items()}
        return means | {"pairs/trained": Sum(num_pairs)}
    names = {"full_kl": "kl/full_per_token", "same_top": "kl/same_top_fraction"}
    return {names[name]: Mean(value, total.num_tokens.item()) for name, value in others.items()}


def update_metrics(role: str, taken: UpdateLog, weights: Sequence[int]) -> dict[str, MetricValue]:
    """Losses, gradient norm, learning rate and skips of a role's updates. `weights`: the denominator of each loss."""
    applied = [(r, weight) for r, weight in zip(taken.results, weights, strict=True) if r.refusal is None]
    balancing = [r.balancing_loss for r, _ in applied if r.balancing_loss is not None]
    of_experts: dict[str, MetricValue] = {f"{role}/balancing_loss": Mean.of(balancing)} if balancing else {}
    return of_experts | {
        f"{role}/loss": Mean(sum(r.loss * weight for r, weight in applied), sum(weight for _, weight in applied)),
        f"{role}/gradient_norm": Mean.of(r.gradient_norm for r, _ in applied),
        f"{role}/learning_rate": Last((taken.whole or taken.results)[-1].learning_rate),
        f"{role}/skipped_updates": Sum(len(taken.whole) - len(applied)),
    }


def first_minibatch_metrics(total: PolicyStatistics) -> dict[str, MetricValue]:
    """Differences between learner and sampler before the first update of a step. All should be 0."""
    count = total.num_tokens.item()
    return {
        "first_minibatch/max_abs_log_ratio": Max(total.max_abs_log_ratio.item()),
        "first_minibatch/mean_abs_log_ratio": Mean(total.abs_log_ratio.item(), count),
        "first_minibatch/clip_fraction": Mean(total.clipped.item(), count),
    }
