"""Brings docs/metrics.md up to date with the declarations: all but the definitions, which are written there.

PYTHONPATH=tests python -m docs.metrics_page > docs/metrics.md
"""

from collections.abc import Iterable, Mapping, Sequence

from proximo.metrics.alarms import Rule, Severity
from proximo.metrics.definitions import Curve, Metric
from proximo.metrics.report.views import definition_of
from proximo.metrics.shared_declarations import RUN, SPEED
from proximo.metrics.values import Deviation, ExponentialMean, Last, Max, Mean, MetricValue, Quantile, Sum
from proximo.trainer_kinds import TrainerKind, trainer_kinds

REDUCTIONS: Mapping[type[MetricValue], str] = {
    Mean: "mean",
    ExponentialMean: "exp of the mean",
    Deviation: "standard deviation",
    Sum: "sum",
    Quantile: "quantile of all values",
    Max: "max",
    Last: "last",
}

OPENING = """\
# Metrics

<!-- The definitions are written here. All else is generated from the declarations; a test compares the two. -->

Every run writes one line per step to `metrics.jsonl`: `step`, then the metrics on this page. TensorBoard and
`report.html` show the same numbers. A metric that is not on this page cannot be recorded.

**Reduction over a step.** A step consists of micro-batches, minibatches and epochs. A mean is stored as a total and a
count until the step ends. It is therefore the mean over all tokens (or responses, pairs, updates) of the step, not a
mean of means. The column *over the step* gives the reduction of each metric.

**Missing values.** A metric without data in a step is absent from its line; it is not 0. A metric that is NaN or
infinite is absent too; it is counted in `progress/non_finite_metrics` and named in a warning. Responses that an
infrastructure fault excluded count only in `response/unscored`.

**Reproducibility.** Two runs of one recipe on the same kind of machine write bit-identical numbers, and so does a run
that was killed and resumed. Times, throughput and memory (marked †) are the exception.

Units: a *nat* is the unit of information with the natural logarithm (1 nat = 1.44 bits). *score* is the unit of the
reward source.
"""

READING = """\
## What a good run looks like

Read the samples first, then the score, the KL and the answer length together: each alone can look good in a bad run.
The loss curves of PPO say little. The report shows the text below under each curve and raises the alarms automatically.
A rule about fifths compares fifths of the run's steps, and needs at least five steps. A rule that compares the end of a
run with its beginning waits for half of the run, or 200 steps. In SFT, reward model, DPO and KTO training, held-out
data is judged only in the second half of the run, and a fraction of pairs or answers by their number. The same rules
apply during the run: an alarm is printed when it is first raised. The tables list causes before effects; an alarm that
another one explains is folded under it.

A score is *high* in either of two cases. Its last fifth is within noise of its best, and above the first fifth by more
than the spread of the scores in that fifth. Or nine of ten responses have the best score of their step or
`ppo.solved_score`. No alarm is raised for the consequences of a high score.
"""

SAMPLES = """\
## Samples

`samples.jsonl` has one line per stored answer. `kind` is `train` or `evaluation`; missing values are `null`.

| field | meaning |
|---|---|
| `step` | the step in which it was sampled; 0 is before training |
| `prompt_id`, `prompt` | the prompt |
| `response` | the decoded answer |
| `score`, `components` | the score, and its named parts |
| `gold` | the held-out gold score |
| `kl` | sum over tokens of k1, in nats |
| `num_tokens` | tokens of the answer |
| `finish` | `eos`, `stop`, `length` or `aborted` |
| `state`, `reason` | only for a fault: `model_fault` or `infrastructure_fault`, and the reason |

Runs of a reward model and of DPO store held-out pairs instead (`kind` is `pair`): `step`, `prompt`, `chosen`,
`rejected`, `score_chosen`, `score_rejected`; the scores of DPO are implicit rewards. The calibration plot of the report
uses the pairs of the last evaluation. Runs of KTO store held-out answers (`kind` is `labelled`): `step`, `prompt`,
`response`, `desirable` (the label) and `score` (the implicit reward). Runs of a process reward model store held-out
solutions, with the `labels` of their steps and the `probabilities` that these are right; `score` is the lowest.
"""


def metrics_page() -> str:
    """The page docs/metrics.md as Markdown."""
    kinds = trainer_kinds()
    own = {heading: metrics for kind in kinds for heading, metrics in kind.metrics.tables.items()}
    held_out = tuple(dict.fromkeys(metric for kind in kinds for metric in kind.metrics.evaluation))
    tables = own | {"Evaluation on held-out data": held_out, "Every run": RUN}
    health = [_health(kind) for kind in kinds]
    speed = ["### Speed of every run\n", *_curve_lines(SPEED), ""]
    return "\n".join([OPENING, *(_metric_table(*table) for table in tables.items()), READING, *health, *speed, SAMPLES])


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
    print(metrics_page(), end="")
