"""Counts of what reward sources do: time, failures, retries and cache hits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proximo.distributed.world import current
from proximo.metrics.values import Mean, MetricValue, Quantile, Sum
from proximo.records import Scored, ScoreState
from proximo.rewards.source import MeasuredSource, RewardSource
from proximo_verifiers.grader import GradeCounts

QUANTILES: Mapping[str, float] = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def grade_metrics(counts: GradeCounts, name: str) -> dict[str, MetricValue]:
    """The declared metrics of the source `name`, empty if nothing was scored.

    Fractions are of all responses that were to be scored.
    """
    if not counts.num_responses:
        return {}
    fractions = {
        "timeout_fraction": counts.num_timeouts,
        "failure_fraction": counts.num_failures,
        "model_fault_fraction": counts.num_model_faults,
        "cache_hit_fraction": counts.num_cache_hits,
    }
    values: dict[str, MetricValue] = {key: Mean(count, counts.num_responses) for key, count in fractions.items()}
    values |= _percentiles(counts.seconds)
    values |= {"retries": Sum(counts.num_retries), "worker_restarts": Sum(counts.num_restarts)}
    return {f"source/{name}/{key}": value for key, value in values.items()}


@dataclass(kw_only=True)
class BatchStatistics:
    """Counts of a source that scores a batch in one call, without retries."""

    num_responses: int = 0
    num_failures: int = 0
    seconds: list[float] = field(default_factory=list)
    """Time of each batch."""

    def count(self, scored: Sequence[Scored], seconds: float) -> None:
        """Counts a batch that was scored in `seconds`; ignores an empty one."""
        if scored:
            self.num_responses += len(scored)
            self.num_failures += sum(item.state is ScoreState.INFRASTRUCTURE_FAULT for item in scored)
            self.seconds.append(seconds)

    def taken(self, name: str) -> dict[str, MetricValue]:
        """The declared metrics of the source `name`, empty if nothing was scored. Resets the counts."""
        if not self.num_responses:
            return {}
        failures: dict[str, MetricValue] = {"failure_fraction": Mean(self.num_failures, self.num_responses)}
        values = failures | _percentiles(self.seconds)
        self.num_responses, self.num_failures, self.seconds = 0, 0, []
        return {f"source/{name}/{key}": value for key, value in values.items()}


def _percentiles(seconds: Sequence[float]) -> dict[str, MetricValue]:
    return {f"seconds_{key}": Quantile(share, tuple(seconds)) for key, share in QUANTILES.items()}


def statistics_of(source: RewardSource | None) -> dict[str, MetricValue]:
    """The metrics of a source since the last call; empty for a source without metrics. On ranks, those of rank 0."""
    if source is None:
        return {}
    return current().once(
        lambda: dict(source.statistics()) if isinstance(source, MeasuredSource) else {},
        what=f"statistics of {source.name}",
    )
