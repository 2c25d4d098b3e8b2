"""What one kind of trainer measures, how that is shown, and when it is a sign of trouble."""

from collections.abc import Mapping
from dataclasses import dataclass

from proximo.metrics.alarms import Rule
from proximo.metrics.curves import Curve
from proximo.metrics.definitions import Metric


@dataclass(frozen=True, kw_only=True)
class TrainerMetrics:
    """Everything that progress lines, reports and alarms need to know about the numbers of a trainer."""

    tables: Mapping[str, tuple[Metric, ...]]
    """Its own metrics, below the headings that they have in docs/metrics.md."""
    evaluation: tuple[Metric, ...]
    """What it measures on held-out data. Several trainers may declare the same metric."""
    watched: Mapping[str, str]
    """Metric name -> the short word for it in progress lines."""
    before_after: Mapping[str, tuple[str, ...]]
    """Label -> the metrics that can stand for it, best first: held-out figures compare the same prompts."""
    curves: tuple[Curve, ...]
    """The pictures of its report, in that order."""
    rules: tuple[Rule, ...]
    """Its alarms, causes before effects."""
    num_headlines: int = 1
    """How many of its figures stand at the head of the report of a pipeline."""
