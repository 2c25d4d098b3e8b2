"""Metrics of reward sources: times and failures."""

from proximo.metrics.definitions import Better, Metric
from proximo.metrics.values import Mean, MetricValue, Quantile, Sum


def _metric(name: str, reduction: type[MetricValue], unit: str, definition: str) -> Metric:
    """A metric of a reward source. It is not repeatable: it depends on timing, and a resumed run has an empty cache."""
    return Metric(
        name=f"source/<component>/{name}",
        reduction=reduction,
        unit=unit,
        definition=definition,
        better=Better.DOWN,
        repeatable=False,
    )


SOURCES = (
    _metric(
        "seconds_p50",
        Quantile,
        "seconds",
        "Wall-clock time to grade one answer, or one batch for a function or a reward model: half took no longer.",
    ),
    _metric("seconds_p95", Quantile, "seconds", "Wall-clock time that 95% of the graded answers did not exceed."),
    _metric("seconds_p99", Quantile, "seconds", "Wall-clock time that 99% of the graded answers did not exceed."),
    _metric(
        "timeout_fraction",
        Mean,
        "fraction",
        "Fraction of the responses whose grading exceeded its limit: twice, or for a remote service in the last "
        "attempt.",
    ),
    _metric(
        "failure_fraction",
        Mean,
        "fraction",
        "Fraction of the responses that this source could not score for a reason outside the response.",
    ),
    _metric(
        "model_fault_fraction",
        Mean,
        "fraction",
        "Fraction of the responses that this source marks as faulty, with a real low score; including time-outs.",
    ),
    _metric(
        "retries",
        Sum,
        "tries",
        "Retries after a worker died, a verifier failed, a limit was exceeded or a request failed.",
    ),
    _metric("worker_restarts", Sum, "workers", "Workers that replaced one that ended or was killed."),
    Metric(
        name="source/<component>/cache_hit_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of the responses whose grade came from the cache.",
        repeatable=False,
    ),
)
