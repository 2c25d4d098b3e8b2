"""The metrics of reward sources: how long their work takes and what fails. Not the scores."""

from proximo.metrics.definitions import Better, Metric
from proximo.metrics.values import Mean, MetricValue, Quantile, Sum


def _metric(name: str, reduction: type[MetricValue], unit: str, definition: str) -> Metric:
    """None of them repeats: times, and what times decide; a resumed run remembers no verdict of the one before."""
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
        "Wall-clock time of judging one answer, or by a function or a reward model one batch: half took no longer.",
    ),
    _metric("seconds_p95", Quantile, "seconds", "Wall-clock time that 95% of the answers judged did not exceed."),
    _metric("seconds_p99", Quantile, "seconds", "Wall-clock time that 99% of the answers judged did not exceed."),
    _metric(
        "timeout_fraction",
        Mean,
        "fraction",
        "Share of the responses whose judging exceeded its limit: twice, or for a remote service at the last attempt.",
    ),
    _metric(
        "failure_fraction",
        Mean,
        "fraction",
        "Share of the responses that this source could not score for a reason that is not theirs.",
    ),
    _metric(
        "model_fault_fraction",
        Mean,
        "fraction",
        "Share of the responses that this source calls faulty themselves, with a real low score; time-outs included.",
    ),
    _metric(
        "retries",
        Sum,
        "tries",
        "Tries beyond the first, after a worker died, a judge failed, a limit passed or a request went wrong.",
    ),
    _metric("worker_restarts", Sum, "workers", "Workers started in the place of one that ended or was killed."),
    Metric(
        name="source/<component>/cache_hit_fraction",
        reduction=Mean,
        unit="fraction",
        definition="Share of the responses that were answered from an earlier verdict on the same answer.",
        repeatable=False,
    ),
)
