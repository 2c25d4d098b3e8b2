"""The recipe of process reward model training, its metrics, curves and alarms. Without torch."""

from typing import ClassVar

from pydantic import Field

from proximo.config.data import StepDataConfig
from proximo.config.run import OptimizerConfig
from proximo.metrics.alarms import PROBLEM, Rule
from proximo.metrics.definitions import DOWN, UP, Curve, Metric, Style, Trace, held_out
from proximo.metrics.shared_declarations import HELD_OUT_LOSS
from proximo.metrics.values import Last, Mean, Sum
from proximo.supervised import alarm_checks as checks
from proximo.supervised.metrics import (
    CAUSED_BY_OVERFITTING,
    CONSTANT,
    OVERFITTING_RULE,
    calibration_curve,
    flat_loss_rule,
    spike_rule,
    supervised_metrics,
)
from proximo.supervised.recipes import DropoutSection, ScalarRecipe


class PRMConfig(DropoutSection):
    """Training of a process reward model on solutions whose steps have labels."""

    rows_key: ClassVar[str] = "solutions_per_step"

    solutions_per_step: int = Field(32, ge=1)
    """Solutions per update."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5, schedule="linear")
    """Optimizer of the model."""


class PRMRecipe(ScalarRecipe):
    """What `proximo prm` reads: the model, the solutions with their labels, and how it trains on them."""

    section: ClassVar[str] = "prm"
    memory_settings: ClassVar[str] = "lower prm.tokens_per_microbatch, or set model.activation_checkpointing"

    data: StepDataConfig
    """Solutions in steps."""
    prm: PRMConfig = PRMConfig()
    """Training settings."""


TRAINING = (
    Metric("prm/loss", Mean, "nats per step", DOWN),
    Metric("prm/step_accuracy", Mean, "fraction", UP),
    Metric("prm/label_mean", Mean, "fraction"),
    Metric("prm/probability_mean", Mean, "fraction"),
    Metric("prm/solutions", Sum, "solutions"),
    Metric("prm/steps", Sum, "steps"),
)

EVALUATION = (
    HELD_OUT_LOSS,
    Metric("evaluation/constant_loss", Last, "nats"),
    Metric("evaluation/step_accuracy", Mean, "fraction", UP),
    Metric("evaluation/error_found", Mean, "fraction", UP),
    Metric("evaluation/right_accepted", Mean, "fraction", UP),
    Metric("evaluation/step_calibration_error", Last, "fraction", DOWN),
    Metric("evaluation/solutions", Sum, "solutions"),
    Metric("evaluation/steps", Sum, "steps"),
)

CURVES = (
    Curve("loss", "Loss", "nats per step").draws(
        Trace("prm/loss", "training"),
        held_out("evaluation/loss"),
        Trace("evaluation/constant_loss", "a constant, held out", Style.POINTS),
        healthy="Falls well below the loss of a constant. Held-out loss rising: use the lowest point.",
    ),
    Curve("errors", "First errors found, right solutions accepted", "fraction of held-out solutions", share=True).draws(
        Trace("evaluation/error_found", "error found", Style.POINTS),
        Trace("evaluation/right_accepted", "right accepted", Style.POINTS),
        healthy="Both rise. One near 0 and the other near 1: the model calls every step right, or every step wrong.",
    ),
    Curve("accuracy", "Step accuracy", "fraction of steps", share=True).draws(
        Trace("prm/step_accuracy", "training"),
        held_out("evaluation/step_accuracy"),
        healthy="Above the larger of the mean label and 1 minus it, which is the accuracy of a constant. Training far "
        "above held out: overfitting.",
    ),
    Curve("means", "Mean label and mean probability", "fraction", share=True).draws(
        Trace("prm/label_mean", "label"),
        Trace("prm/probability_mean", "probability"),
        healthy="The curves lie on each other after a short start.",
    ),
    calibration_curve(
        "evaluation/step_calibration_error",
        "Below about 0.05. High with a good accuracy: products and minima of probabilities mean less.",
    ),
)

RULES = (
    spike_rule("prm/loss", "prm.optimizer"),
    flat_loss_rule("prm/loss", "prm.optimizer", checks.FLAT_LOSS),
    Rule(CONSTANT, PROBLEM, checks.is_no_better_than_a_constant, explains=CAUSED_BY_OVERFITTING).worded(
        when=f"in the second half of the run no evaluation/loss so far is below {checks.CONSTANT_LOSS:.0%} of "
        "evaluation/constant_loss, over 100 held-out steps or more",
        advice="PPO against it would learn noise. Check that step_separator is the one of the data, that labels are "
        "those of their steps, and prm.optimizer.learning_rate.",
    ),
    OVERFITTING_RULE,
)

METRICS = supervised_metrics(
    "prm",
    "Process reward model",
    TRAINING,
    evaluation=EVALUATION,
    watched={
        "prm/loss": "loss",
        "prm/step_accuracy": "accuracy",
        "evaluation/loss": "held-out loss",
        "evaluation/error_found": "errors found",
    },
    before_after={
        "First error found": ("evaluation/error_found",),
        "Right solutions accepted": ("evaluation/right_accepted",),
        "Step accuracy": ("evaluation/step_accuracy", "prm/step_accuracy"),
        "Loss": ("evaluation/loss", "prm/loss"),
        "Calibration error": ("evaluation/step_calibration_error",),
    },
    curves=CURVES,
    gradients="Steady.",
    rules=RULES,
)


SCHEMA = PRMRecipe
