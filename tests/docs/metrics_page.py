"""Brings docs/metrics.md up to date with the declarations. Definitions of metrics, and what surrounds tables, stay.

PYTHONPATH=tests python -m docs.metrics_page
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from proximo import message_text
from proximo.metrics.alarms import Rule, Severity
from proximo.metrics.definitions import Curve, Metric
from proximo.metrics.report.views import definition_of
from proximo.metrics.shared_declarations import RUN, SPEED
from proximo.metrics.values import Deviation, ExponentialMean, Last, Max, Mean, MetricValue, Quantile, Sum
from proximo.trainer_kinds import TrainerKind, trainer_kinds

PAGE = message_text.folder() / "metrics.md"
REDUCTIONS: Mapping[type[MetricValue], str] = {
    Mean: "mean",
    ExponentialMean: "exp of the mean",
    Deviation: "standard deviation",
    Sum: "sum",
    Quantile: "quantile of all values",
    Max: "max",
    Last: "last",
}


def metrics_page() -> str:
    """The page docs/metrics.md as Markdown: its tables and lists are made anew, and all else is kept."""
    kinds = trainer_kinds()
    own = {heading: metrics for kind in kinds for heading, metrics in kind.metrics.tables.items()}
    held_out = tuple(dict.fromkeys(metric for kind in kinds for metric in kind.metrics.evaluation))
    tables = own | {"Evaluation on held-out data": held_out, "Every run": RUN}
    made = {f"## {heading}": _metric_table(heading, metrics) for heading, metrics in tables.items()}
    made |= {f"### {kind.title}": _health(kind) for kind in kinds}
    made["### Speed of every run"] = "\n".join(["### Speed of every run\n", *_curve_lines(SPEED), ""])
    parts = re.split(r"^(?=##+ )", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return "".join(made[heading] + "\n" if (heading := part.partition("\n")[0]) in made else part for part in parts)


def _metric_table(heading: str, metrics: Sequence[Metric]) -> str:
    head = ["| metric | unit | over the step | better | definition |", "|---|---|---|---|---|"]
    return "\n".join([f"## {heading}\n", *head, *map(_metric_line, metrics), ""])


def _metric_line(metric: Metric) -> str:
    mark = "" if metric.repeatable else " †"
    better = metric.better or ""
    cells = [f"`{metric.name}`{mark}", metric.unit, REDUCTIONS[metric.reduction], better, definition_of(metric)]
    return _row(cells)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _health(kind: TrainerKind) -> str:
    curves = [curve for curve in kind.metrics.curves if curve not in SPEED]
    return "\n".join([f"### {kind.title}\n", *_curve_lines(curves), "", *_rule_table(kind.metrics.rules)])


def _curve_lines(curves: Sequence[Curve]) -> list[str]:
    return [
        f"- **{curve.title}** ({', '.join(f'`{trace.name}`' for trace in curve.traces)}): {curve.healthy}"
        for curve in curves
    ]


def _rule_table(rules: Sequence[Rule]) -> list[str]:
    head = ["| alarm | raised when | what to do |", "|---|---|---|"]
    lines = [
        _row([f"{rule.title}{' (problem)' if rule.severity is Severity.PROBLEM else ''}", rule.when, rule.advice])
        for rule in rules
    ]
    return [*head, *lines, ""]


if __name__ == "__main__":
    PAGE.write_text(metrics_page(), encoding="utf-8")
