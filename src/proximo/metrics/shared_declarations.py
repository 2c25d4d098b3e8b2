"""What a trainer declares of its metrics, and what several share: alarm rules, curves, metrics of every run.

Those of one trainer are in its folder. Evaluation draws its random numbers for a separate purpose without a step, so
two steps answer the same prompts with the same numbers and differ only by the policy.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from proximo.message_text import count_of
from proximo.metrics.alarms import PROBLEM, WARNING, Rule, counted
from proximo.metrics.definitions import DOWN, UP, Curve, Metric, Section, Trace
from proximo.metrics.run_files import Run, setting
from proximo.metrics.values import Last, Max, Mean, Sum

NO_UPDATE, SKIPPED, NOT_FINITE = "No update was taken", "Updates were skipped", "Some metrics were not finite"
TOO_FAST = "The learning rate is far too high"
MAX_LEARNING_RATE = 0.1
"""An update of AdamW moves a weight by about the learning rate, and most weights of a model are smaller than this."""
TRAINED_OPTIMIZERS = ("optimizer", "policy_optimizer")
"""The section of the optimizer of the model that a trainer is for, within its own."""
IDLE_STEPS = 10
"""Steps in a row without an update after which the alarm is raised, however long the run is."""
Lines = Sequence[Mapping[str, float]]
"""Lines of metrics.jsonl."""


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


def idle_lines(run: Run, *, first_step: int = 1) -> Lines:
    """The lines of the last steps without an update, if there are too many of them; otherwise none.

    Too many are half of the run's steps, at least three, or all of a shorter run, and never more than IDLE_STEPS.
    `first_step`: the first one that is to take an update.
    """
    steps = [line for line in run.lines if line["step"] >= first_step and "progress/updates" in line]
    before = [0.0, *(line["progress/updates"] for line in steps)]
    idle = 0
    while idle < len(steps) and before[-1 - idle] == before[-2 - idle]:
        idle += 1
    total = IDLE_STEPS * 2 if run.total_steps is None else run.total_steps - first_step + 1
    enough = min(IDLE_STEPS, max(min(3, total), math.ceil(total / 2)))
    return steps[len(steps) - idle :] if idle >= max(1, enough) else ()


def no_update_detail(run: Run, idle: Lines, causes: Mapping[str, Callable[[Mapping[str, float]], bool]]) -> str:
    """Since when there was no update, and why. `causes`: words -> whether they hold in the line of a step."""
    last = int(run.lines[-1]["step"])
    since = int(idle[0]["step"])
    steps = f"in steps {since} to {last}" if last > since else f"in step {last}"
    number = idle[-1]["progress/updates"]
    counts = {words: sum(map(holds, idle)) for words, holds in causes.items()}
    found = [
        words if count == len(idle) else f"{words} in {count} of these {count_of(len(idle), 'step')}"
        for words, count in counts.items()
        if count
    ]
    return f"{count_of(int(number), 'update')} in all, none {steps}: {'; '.join(found) or 'no token counted'}."


def _was_skipped(line: Mapping[str, float]) -> bool:
    return any(value > 0 for name, value in line.items() if name.endswith("/skipped_updates"))


SKIPPED_CAUSE: dict[str, Callable[[Mapping[str, float]], bool]] = {
    "every update was skipped, for a number that was not finite or by a guard": _was_skipped
}
"""The cause that every trainer may have."""


def _no_update(run: Run) -> str | None:
    idle = idle_lines(run)
    return no_update_detail(run, idle, SKIPPED_CAUSE) if idle else None


def _skipped(run: Run) -> str | None:
    """Counts the skipped updates of all trained models."""
    return counted(run, "Updates", *(name for name in run.names if name.endswith("/skipped_updates")))


def _too_fast(run: Run) -> str | None:
    """Names the optimizer with the destructive learning rate. A value model has a separate alarm."""
    found = [
        f"{section}.{key}.learning_rate is {settings['learning_rate']:g}."
        for section, trainer in (run.config or {}).items()
        for key, settings in (trainer.items() if isinstance(trainer, Mapping) else ())
        if key in TRAINED_OPTIMIZERS and (setting(settings, "learning_rate") or 0.0) > MAX_LEARNING_RATE
    ]
    return " ".join(found) or None if any(line["step"] > 0 for line in run.lines) else None


def rate_rule(explains: tuple[str, ...]) -> Rule:
    """The rule for learning rates that destroy any model. `explains`: alarms of the trainer."""
    return Rule(TOO_FAST, PROBLEM, _too_fast, explains=explains).worded(
        when=f"the learning_rate of the trained model's optimizer is above {MAX_LEARNING_RATE}",
        advice="An update moves each weight by about so much, and most weights are below 0.1: nothing is left of the "
        "model. Start another run with the learning rate of a recipe of `proximo recipes`: --resume keeps it.",
    )


def no_update_rule(check: Callable[[Run], str | None] = _no_update, *, explains: Sequence[str] = ()) -> Rule:
    """The rule for steps without an update. `check`: with the causes of a trainer. `explains`: its own alarms."""
    return Rule(NO_UPDATE, PROBLEM, check, explains=(*explains, SKIPPED, NOT_FINITE)).worded(
        when="progress/updates does not grow in the last half of the run's steps, in all of a run of up to three "
        f"steps, or in {IDLE_STEPS} steps in a row",
        advice="What the run saves is the model of the last update. Remove the cause, and start another run: --resume "
        "keeps the settings of this one.",
    )


COMMON_RULES = (
    Rule(SKIPPED, WARNING, _skipped).worded(
        when="a count of skipped updates is above 0 in any step",
        advice="A few are harmless. If there are many, lower the learning rate; gradients that are not finite "
        "indicate a problem of the data or the precision.",
    ),
    Rule(NOT_FINITE, WARNING, lambda run: counted(run, "Metrics", "progress/non_finite_metrics")).worded(
        when="progress/non_finite_metrics is above 0 in any step",
        advice="NaN or infinity in a statistic is often the first sign of divergence: log.txt names the metrics.",
    ),
)


MEMORY = Curve("memory", "Peak memory", "MiB", section=Section.SPEED, from_zero=True).draws(
    Trace("memory/peak_mib", "peak"),
    healthy="Constant after the first steps. A steady rise indicates a memory leak.",
)

SPEED = (
    Curve("throughput", "Throughput", "tokens per second", section=Section.SPEED, from_zero=True).draws(
        Trace("throughput/train_tokens_per_second", "training"),
        healthy="Constant, except for changes of the sequence lengths. Falling: another process uses the machine, or "
        "memory is short.",
    ),
    Curve("time", "Time of a step", "seconds", section=Section.SPEED, from_zero=True).draws(
        Trace("time/step_seconds", "step"),
        healthy="Constant. Evaluation and saving are not included.",
    ),
    MEMORY,
)


HELD_OUT_LOSS = Metric("evaluation/loss", Mean, "nats", DOWN)

PAIRS = (
    Metric("evaluation/pairs", Sum, "pairs"),
    Metric("evaluation/pair_accuracy", Mean, "fraction", UP),
    Metric("evaluation/margin_mean", Mean, "score", UP),
    Metric("evaluation/score_chosen_mean", Mean, "score"),
    Metric("evaluation/score_rejected_mean", Mean, "score"),
)

CALIBRATION = Metric("evaluation/calibration_error", Last, "fraction", DOWN)


def balancing_metric(group: str) -> Metric:
    """`group`: the first part of the name."""
    return Metric(f"{group}/balancing_loss", Mean, "experts per token", DOWN)


PROGRESS = (
    Metric("progress/step", Last, "steps"),
    Metric("progress/epoch", Last, "epochs"),
    Metric("progress/prompts", Last, "prompts"),
    Metric("progress/updates", Last, "updates"),
    Metric("progress/non_finite_metrics", Sum, "metrics", DOWN),
    Metric("progress/sink_failures", Sum, "failures", DOWN, repeatable=False),
    Metric("progress/push_failures", Sum, "failures", DOWN, repeatable=False),
)

FILTER = (
    Metric("filter/active", Last, "prompts"),
    Metric("filter/too_easy", Last, "prompts"),
    Metric("filter/too_hard", Last, "prompts"),
    Metric("filter/kept_beyond_bounds", Last, "prompts"),
)

TIMED = """rollout generate_greedy score reference values policy_logprobs policy_logprobs_and_values experience
train_value train_policy push_weights move_average follow_policy extra train_policy_and_value evaluate step"""

TIME = tuple(Metric(f"time/{phase}_seconds", Sum, "seconds", DOWN, repeatable=False) for phase in TIMED.split())

THROUGHPUT = (
    Metric("throughput/rollout_tokens_per_second", Mean, "tokens per second", UP, repeatable=False),
    Metric("throughput/train_tokens_per_second", Mean, "tokens per second", UP, repeatable=False),
    Metric("memory/peak_mib", Max, "MiB", DOWN, repeatable=False),
)

RUN = (*PROGRESS, *FILTER, *TIME, *THROUGHPUT)
