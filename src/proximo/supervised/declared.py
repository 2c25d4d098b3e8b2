"""What the declared metrics of SFT, reward models, DPO and KTO have alike: each adds its own (`supervised_metrics`)."""

from collections.abc import Mapping

from proximo.metrics.alarms import Rule
from proximo.metrics.curves import Curve, Section, Trace, held_out
from proximo.metrics.declared.curves import SPEED
from proximo.metrics.declared.experts import balancing_metric
from proximo.metrics.declared.rules import COMMON_RULES, no_update_rule
from proximo.metrics.definitions import Better, Metric
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
        Metric(
            name=f"{group}/gradient_norm",
            reduction=Mean,
            unit="norm",
            definition="L2 norm of the gradient before clipping, mean over updates.",
        ),
        Metric(
            name=f"{group}/learning_rate",
            reduction=Last,
            unit="per update",
            definition="Learning rate of the last update.",
        ),
        Metric(
            name=f"{group}/skipped_updates",
            reduction=Sum,
            unit="updates",
            definition="Updates skipped because the gradient was not finite.",
            better=Better.DOWN,
        ),
        balancing_metric(group),
    )


def _update_curves(group: str, gradients: str) -> tuple[Curve, ...]:
    return (
        Curve(
            key="gradients",
            title="Gradient norm",
            unit="norm before clipping",
            traces=(Trace(f"{group}/gradient_norm", "training"),),
            healthy=gradients,
            section=Section.MORE,
        ),
        Curve(
            key="learning-rate",
            title="Learning rate",
            unit="per update",
            traces=(Trace(f"{group}/learning_rate", "training"),),
            healthy="As set in the recipe.",
            section=Section.MORE,
        ),
    )


def pair_curves(group: str, accuracy: str, *, healthy_accuracy: str, healthy_loss: str) -> tuple[Curve, Curve]:
    """Accuracy and loss over pairs, in training and held out. `accuracy`: the metric of the accuracy in training."""
    return (
        Curve(
            key="accuracy",
            title="Pair accuracy",
            unit="fraction of pairs",
            traces=(Trace(accuracy, "training"), held_out("evaluation/pair_accuracy")),
            healthy=healthy_accuracy,
            guide=0.5,
            share=True,
        ),
        Curve(
            key="loss",
            title="Loss",
            unit="nats per pair",
            traces=(Trace(f"{group}/loss", "training"), held_out("evaluation/loss")),
            healthy=healthy_loss,
            guide=0.6931471805599453,
        ),
    )


def calibration_curve(metric: str, healthy: str, *, section: Section = Section.MAIN) -> Curve:
    """The calibration error on held-out data."""
    return Curve(
        key="calibration-error",
        title="Calibration error",
        unit="fraction",
        traces=(held_out(metric),),
        healthy=healthy,
        section=section,
    )
