"""What the declared metrics of SFT, reward models, DPO and KTO have alike: each adds its own (`supervised_metrics`)."""

from collections.abc import Mapping

from proximo.metrics.alarms import Rule
from proximo.metrics.curves import Curve, Section, Trace, held_out
from proximo.metrics.declared import COMMON_RULES, SPEED, balancing_metric, no_update_rule
from proximo.metrics.definitions import DOWN, Metric
from proximo.metrics.trainer_metrics import TrainerMetrics
from proximo.metrics.values import Last, Mean, Sum
from proximo.supervised.alarms import RATE_RULE


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
        Metric(f"{group}/gradient_norm", Mean, "norm").means(
            "L2 norm of the gradient before clipping, mean over updates."
        ),
        Metric(f"{group}/learning_rate", Last, "per update").means("Learning rate of the last update."),
        Metric(f"{group}/skipped_updates", Sum, "updates", DOWN).means(
            "Updates skipped because the gradient was not finite."
        ),
        balancing_metric(group),
    )


def _update_curves(group: str, gradients: str) -> tuple[Curve, ...]:
    return (
        Curve(
            "gradients",
            "Gradient norm",
            "norm before clipping",
            (Trace(f"{group}/gradient_norm", "training"),),
            section=Section.MORE,
        ).when_healthy(gradients),
        Curve(
            "learning-rate",
            "Learning rate",
            "per update",
            (Trace(f"{group}/learning_rate", "training"),),
            section=Section.MORE,
        ).when_healthy("As set in the recipe."),
    )


def pair_curves(group: str, accuracy: str, *, healthy_accuracy: str, healthy_loss: str) -> tuple[Curve, Curve]:
    """Accuracy and loss over pairs, in training and held out. `accuracy`: the metric of the accuracy in training."""
    return (
        Curve(
            "accuracy",
            "Pair accuracy",
            "fraction of pairs",
            (Trace(accuracy, "training"), held_out("evaluation/pair_accuracy")),
            share=True,
            guide=0.5,
        ).when_healthy(healthy_accuracy),
        Curve(
            "loss",
            "Loss",
            "nats per pair",
            (Trace(f"{group}/loss", "training"), held_out("evaluation/loss")),
            guide=0.6931471805599453,
        ).when_healthy(healthy_loss),
    )


def calibration_curve(metric: str, healthy: str, *, section: Section = Section.MAIN) -> Curve:
    """The calibration error on held-out data."""
    return Curve(
        "calibration-error", "Calibration error", "fraction", (held_out(metric),), section=section
    ).when_healthy(healthy)
