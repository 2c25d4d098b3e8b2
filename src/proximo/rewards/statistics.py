"""How a source of scores fares: how long it takes, what fails, what it need not do twice. Not the scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proximo.metrics.values import Mean, MetricValue, Quantile, Sum
from proximo.records import Scored
from proximo.rewards.source import MeasuredSource, RewardSource

QUANTILES: Mapping[str, float] = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(kw_only=True)
class SourceStatistics:
    """Counts since they were last taken. Fractions are of all responses that were asked about."""

    num_responses: int = 0
    num_cache_hits: int = 0
    """Answered from an earlier grade on the same answer."""
    num_timeouts: int = 0
    num_failures: int = 0
    """Without a score, through no fault of the answer."""
    num_model_faults: int = 0
    """With a score that says what is wrong with the answer; time-outs are among them."""
    num_retries: int = 0
    num_restarts: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of each answer that was graded; the limit for one that was given up."""

    def metrics(self, name: str) -> dict[str, MetricValue]:
        """The declared metrics of the source of that name."""
        fractions = {
            "timeout_fraction": self.num_timeouts,
            "failure_fraction": self.num_failures,
            "model_fault_fraction": self.num_model_faults,
            "cache_hit_fraction": self.num_cache_hits,
        }
        values: dict[str, MetricValue] = {key: Mean(count, self.num_responses) for key, count in fractions.items()}
        values |= _percentiles(self.seconds)
        values |= {"retries": Sum(self.num_retries), "worker_restarts": Sum(self.num_restarts)}
        return {f"source/{name}/{key}": value for key, value in values.items()}


@dataclass(kw_only=True)
class BatchStatistics:
    """Of a source that is asked about a batch in one call and once: what takes too long there ends the run."""

    num_responses: int = 0
    num_failures: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of each batch."""

    def count(self, scored: Sequence[Scored], seconds: float) -> None:
        """A batch that was scored in so long; an empty one is none."""
        if scored:
            self.num_responses += len(scored)
            self.num_failures += sum(not each.valid for each in scored)
            self.seconds.append(seconds)

    def taken(self, name: str) -> dict[str, MetricValue]:
        """The declared metrics of the source of that name, and the counts start anew; nothing where none was scored."""
        if not self.num_responses:
            return {}
        failures: dict[str, MetricValue] = {"failure_fraction": Mean(self.num_failures, self.num_responses)}
        values = failures | _percentiles(self.seconds)
        self.num_responses, self.num_failures, self.seconds = 0, 0, []
        return {f"source/{name}/{key}": value for key, value in values.items()}


def _percentiles(seconds: Sequence[float]) -> dict[str, MetricValue]:
    return {f"seconds_{key}": Quantile(share, tuple(seconds)) for key, share in QUANTILES.items()}


def statistics_of(source: RewardSource | None) -> dict[str, MetricValue]:
    """What a source that counts did since it was last asked; nothing of one that does not."""
    return dict(source.statistics()) if isinstance(source, MeasuredSource) else {}
