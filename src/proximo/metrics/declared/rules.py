"""The alarm rules of every run. Rules of one trainer are declared beside it."""

from proximo.metrics.alarms import Rule, Severity, counted
from proximo.metrics.run_files import Run

SKIPPED, NOT_FINITE = "Updates were skipped", "Some metrics were not finite"


def _skipped(run: Run) -> str | None:
    """Counts the skipped updates of all trained models."""
    return counted(run, "Updates", *(name for name in run.names if name.endswith("/skipped_updates")))


COMMON_RULES = (
    Rule(
        title=SKIPPED,
        when="a count of skipped updates is above 0 in any step",
        advice="A few are harmless. If there are many, lower the learning rate; gradients that are not finite "
        "indicate a problem of the data or the precision.",
        severity=Severity.WARNING,
        check=_skipped,
    ),
    Rule(
        title=NOT_FINITE,
        when="progress/non_finite_metrics is above 0 in any step",
        advice="NaN or infinity in a statistic is often the first sign of divergence: log.txt names the metrics.",
        severity=Severity.WARNING,
        check=lambda run: counted(run, "Metrics", "progress/non_finite_metrics"),
    ),
)
