"""What the metrics, curves and alarms of supervised trainers have alike. The checks: alarm_checks.py."""

from collections.abc import Mapping

from proximo.metrics.alarms import PROBLEM, RESTART, WARNING, Rule
from proximo.metrics.definitions import DOWN, Curve, Metric, Section, Trace, held_out
from proximo.metrics.shared_declarations import (
    COMMON_RULES,
    NO_UPDATE,
    NOT_FINITE,
    SKIPPED,
    SPEED,
    TrainerMetrics,
    balancing_metric,
    no_update_rule,
    rate_rule,
)
from proximo.metrics.values import Last, Mean, Sum
from proximo.supervised import alarm_checks as checks
from proximo.supervised.alarm_checks import Accuracy


def supervised_metrics(
    group: str,
    title: str,
    metrics: tuple[Metric, ...],
    *,
    evaluation: tuple[Metric, ...],
    watched: Mapping[str, str],
    before_after: Mapping[str, tuple[str, ...]],
    curves: tuple[Curve, ...],
    gradients: str,
    rules: tuple[Rule, ...],
) -> TrainerMetrics:
    """A trainer's own metrics, curves and alarms, with those of the updates (`task.py::SupervisedTask.step`).

    `group`: the first part of the names. `title`: the heading in docs/metrics.md. `gradients`: what the norm of the
    gradient does in a healthy run.
    """
    return TrainerMetrics(
        tables={title: (*metrics, *_update_metrics(group))},
        evaluation=evaluation,
        watched={
            **watched,
            f"{group}/gradient_norm": "gradient",
            f"{group}/skipped_updates": "skipped updates",
            "throughput/train_tokens_per_second": "tokens/s",
        },
        before_after=before_after,
        curves=(*curves, *_update_curves(group, gradients), *SPEED),
        rules=(RATE_RULE, *rules, no_update_rule(), *COMMON_RULES),
    )


def _update_metrics(group: str) -> tuple[Metric, ...]:
    return (
        Metric(f"{group}/gradient_norm", Mean, "norm"),
        Metric(f"{group}/learning_rate", Last, "per update"),
        Metric(f"{group}/skipped_updates", Sum, "updates", DOWN),
        balancing_metric(group),
    )


def _update_curves(group: str, gradients: str) -> tuple[Curve, ...]:
    return (
        Curve("gradients", "Gradient norm", "norm before clipping", section=Section.MORE).draws(
            Trace(f"{group}/gradient_norm", "training"),
            healthy=gradients,
        ),
        Curve("learning-rate", "Learning rate", "per update", section=Section.MORE).draws(
            Trace(f"{group}/learning_rate", "training"),
            healthy="As set in the recipe.",
        ),
    )


def pair_curves(group: str, accuracy: str, *, healthy_accuracy: str, healthy_loss: str) -> tuple[Curve, Curve]:
    """Accuracy and loss over pairs, in training and held out. `accuracy`: the metric of the accuracy in training."""
    return (
        Curve("accuracy", "Pair accuracy", "fraction of pairs", share=True, guide=0.5).draws(
            Trace(accuracy, "training"),
            held_out("evaluation/pair_accuracy"),
            healthy=healthy_accuracy,
        ),
        Curve("loss", "Loss", "nats per pair", guide=0.6931471805599453).draws(
            Trace(f"{group}/loss", "training"),
            held_out("evaluation/loss"),
            healthy=healthy_loss,
        ),
    )


def calibration_curve(metric: str, healthy: str, *, section: Section = Section.MAIN) -> Curve:
    """The calibration error on held-out data."""
    return Curve("calibration-error", "Calibration error", "fraction", section=section).draws(
        held_out(metric),
        healthy=healthy,
    )


CHANCE, UNLEARNED = "The reward model is no better than chance", "The policy ranks held-out pairs no better than chance"
OVERFITTING = "The held-out loss rises again"
UNLIKELY, OVERCONFIDENT = "The chosen answers become much less likely", "The reward model is overconfident"
CONSTANT = "The process reward model judges steps no better than a constant"
UNLABELLED = "The policy tells held-out answers apart no better than chance"
UNLIKELY_DESIRABLE = "The desirable answers become much less likely"
SPIKE = "The training loss jumped"
GAP, FLAT_LOSS = "Accuracy is much higher in training than held out", "The loss does not fall"
CAUSED_BY_OVERFITTING = (UNLIKELY, UNLIKELY_DESIRABLE, OVERCONFIDENT, OVERFITTING)
"""Alarms that overfitting to single pairs explains."""
CAUSED_BY_SPIKE = (
    FLAT_LOSS,
    CHANCE,
    UNLEARNED,
    UNLABELLED,
    CONSTANT,
    GAP,
    *CAUSED_BY_OVERFITTING,
    NO_UPDATE,
    SKIPPED,
    NOT_FINITE,
)
"""Alarms that one too large step explains."""


RATE_RULE = rate_rule((SPIKE, *CAUSED_BY_SPIKE))


def spike_rule(loss: str, optimizer: str) -> Rule:
    """A rule for spikes of the training loss `loss`. `optimizer`: the config section with its learning rate."""
    return Rule(SPIKE, PROBLEM, lambda run: checks.loss_spike(run, loss), explains=CAUSED_BY_SPIKE).worded(
        when=f"the median of {loss} over five steps is above the lowest mean of three steps before by a quarter, 0.1 "
        "and four times the median change from step to step",
        advice=f"A step was too large: {RESTART}, with a tenth of {optimizer}.learning_rate or less, and with "
        "warmup_updates.",
    )


OVERFITTING_RULE = Rule(OVERFITTING, WARNING, checks.overfits).worded(
    when="in the second half of the run evaluation/loss is above its lowest point by at least 2% and 0.005 nats; for "
    "pairs and labelled answers, also by more than that point over the root of their number",
    advice="The model overfits: stop at the lowest point, or take more data.",
)


def gap_rule(accuracy: Accuracy, advice: str) -> Rule:
    """A rule for the gap between training and held-out accuracy."""
    return Rule(GAP, WARNING, lambda run: checks.accuracy_gap(run, accuracy), explains=CAUSED_BY_OVERFITTING).worded(
        when=f"{accuracy.training}, over the last fifth of the steps before an evaluation in the second half of the "
        f"run, exceeds {accuracy.held_out} by more than {checks.GAP} and by more than {checks.GAP_STANDARD_ERRORS} "
        "standard errors",
        advice=advice,
    )


def chance_rule(title: str, advice: str, accuracy: Accuracy, *rate: str) -> Rule:
    """A rule for held-out accuracy at chance level. `rate`: the config keys of the learning rate."""
    return Rule(
        title, PROBLEM, lambda run: checks.is_at_chance(run, accuracy, *rate), explains=(GAP, *CAUSED_BY_OVERFITTING)
    ).worded(
        when=f"in the second half of the run {accuracy.held_out} is below {checks.CHANCE_ACCURACY}; with fewer than "
        f"100 held-out {accuracy.rows} only if {accuracy.training} is below {checks.LEARNED_ACCURACY} too",
        advice=advice,
    )


def unlikely_rule(title: str, advice: str, logprob: str) -> Rule:
    """A rule for held-out answers that training makes unlikely. `logprob`: the metric of their log-prob."""
    return Rule(title, WARNING, lambda run: checks.become_unlikely(run, logprob)).worded(
        when=f"in the second half of the run {logprob} is below its start by more than a quarter of its absolute value",
        advice=advice,
    )


def flat_loss_rule(loss: str, optimizer: str, least: float) -> Rule:
    """A rule for a training loss `loss` that does not fall. `optimizer`: the config section with its learning rate."""
    return Rule(
        FLAT_LOSS,
        WARNING,
        lambda run: checks.loss_is_flat(run, loss, least),
        explains=(CHANCE, UNLEARNED, UNLABELLED, CONSTANT),
    ).worded(
        when=f"in the second half of the run no evaluation/loss differs from the first by more than {least:.3%} of "
        f"it, and {loss} does not fall by more than its noise (ten steps or more)",
        advice=f"Raise {optimizer}.learning_rate. If it is right, the data contain nothing new for the model.",
    )
