"""The metrics of one kind of trainer, how they are shown, and its alarms."""

from collections.abc import Mapping
from dataclasses import dataclass

from proximo.metrics.alarms import Rule
from proximo.metrics.curves import Curve
from proximo.metrics.definitions import Metric


@dataclass(frozen=True, kw_only=True)
class TrainerMetrics:
    """Everything that progress lines, reports and alarms need to know about the metrics of a trainer."""

    tables: Mapping[str, tuple[Metric, ...]]
    """Its own metrics by their heading in docs/metrics.md."""
    evaluation: tuple[Metric, ...]
    """Its metrics on held-out data. Several trainers may declare the same metric."""
    watched: Mapping[str, str]
    """Metric name -> its label in progress lines."""
    before_after: Mapping[str, tuple[str, ...]]
    """Label -> the metrics that can provide this figure, best first: held-out metrics compare the same prompts."""
    curves: tuple[Curve, ...]
    """The curves of its report, in order."""
    rules: tuple[Rule, ...]
    """Its alarm rules, causes before effects."""
    num_headlines: int = 1
    """How many of its figures are shown at the top of a pipeline's report."""
