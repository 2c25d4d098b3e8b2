"""Writes the page docs/metrics.md from what is declared. Run as a module it prints the page; a test compares both."""

from collections.abc import Iterable, Mapping, Sequence

from proximo.metrics.alarms import Rule, Severity
from proximo.metrics.curves import Curve
from proximo.metrics.declared.curves import SPEED
from proximo.metrics.definitions import Metric
from proximo.metrics.every_run import RUN
from proximo.metrics.values import Deviation, ExponentialMean, Last, Max, Mean, MetricValue, Min, Quantile, Sum
from proximo.trainer_kinds import TrainerKind, trainer_kinds

REDUCTIONS: Mapping[type[MetricValue], str] = {
    Mean: "mean",
    ExponentialMean: "exp of the mean",
    Deviation: "standard deviation",
    Sum: "sum",
    Quantile: "that of all values",
    Max: "largest",
    Min: "smallest",
    Last: "newest",
}

OPENING = """\
# Metrics

<!-- Written by `python -m proximo.metrics.documentation > docs/metrics.md`; a test compares the two. -->

Every run writes one line per step to `metrics.jsonl`: `step`, then the metrics of this page. TensorBoard and
`report.html` show the same numbers and have no others. A metric that is not on this page cannot be recorded.

**How parts combine.** A step is made of micro-batches, minibatches and epochs. A mean is kept as a total and a count
until the step is over, so it is the mean over all tokens (or responses, pairs, updates) of the step and not a mean of
means; the column *over the step* says how each metric combines.

**What is left out.** A metric that saw nothing in a step is absent from its line, which is not the same as 0. One that
is NaN or infinite is absent too, is counted in `progress/non_finite_metrics`, and is named in a warning. Responses that
an infrastructure fault took out count in `response/unscored` and in nothing else.

**What repeats.** Two runs of the same recipe on the same kind of machine write the same numbers bit for bit, and so
does a run that was killed and resumed, but for times, throughput and memory (marked †).

Units: a *nat* is the natural-logarithm unit of information (1 nat = 1.44 bits). *score* is whatever unit the reward
source uses.
"""

READING = """\
## What a good run looks like

Read the samples first, then the score, the KL and the answer length together: each alone can look well in a run that is
not. The loss curves of PPO say little. The report has these words under each curve and raises the alarms below by
itself; a rule that speaks of fifths compares fifths of the run's steps, and is silent before the fifth step. Rules that
compare an end with a beginning wait for half of the run, or 200 steps. In SFT, reward model and DPO training held-out
data is judged in the second half of the run alone, and a share of pairs by how many they are. The same rules watch the
run while it is under way: an alarm is printed once, when it is first raised. In the tables causes stand before effects,
and an alarm that another explains is folded under it.

A score is *high* where its last fifth is within noise of its best, and above the first fifth by more than the scores
of that fifth differed, or nine of ten responses have the best score of their step or `ppo.solved_score`. No rule blames
a run for what follows from that.
"""

SAMPLES = """\
## Samples

`samples.jsonl` has one line per kept answer. `kind` is `train` or `evaluation`; what a run does not have is `null`.

| field | what it is |
|---|---|
| `step` | the step that it was drawn in; 0 is before training |
| `prompt_id`, `prompt` | what was asked |
| `response` | the decoded answer |
| `score`, `components` | the score, and its named parts |
| `gold` | the held-out gold score |
| `kl` | sum over tokens of k1, in nats |
| `num_tokens` | tokens of the answer |
| `finish` | `eos`, `stop`, `length` or `aborted` |
| `state`, `reason` | of a fault alone: `model_fault` or `infrastructure_fault`, and why |

The runs of a reward model and of DPO have held-out pairs instead (`kind` is `pair`): `step`, `prompt`, `chosen`,
`rejected`, `score_chosen`, `score_rejected`; the scores of DPO are implicit rewards. The calibration plot
of the report is made from those of the last evaluation.
"""


def metrics_page() -> str:
    """The page as Markdown."""
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
    cells = [f"`{metric.name}`{mark}", metric.unit, REDUCTIONS[metric.reduction], better, metric.definition]
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
