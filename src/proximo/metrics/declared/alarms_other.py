"""The rules for supervised and reward model training, and those that every run has. Not those of PPO."""

from proximo.metrics.alarms import Rule, Severity, counted, fifths
from proximo.metrics.formatting import format_number as number
from proximo.metrics.run_files import Run, Series


def _learns_by_heart(run: Run) -> str | None:
    losses = run.series("evaluation/loss")
    if len(losses) < 3:
        return None
    best = min(losses.values)
    if losses.values[-1] < 1.02 * best:
        return None
    step = losses.steps[losses.values.index(best)]
    return f"It was lowest, {number(best)}, at step {step}, and is {number(losses.values[-1])} at the end."


def no_better_than_a_coin(run: Run) -> str | None:
    """Of held-out pairs."""
    accuracy = run.series("evaluation/pair_accuracy")
    if len(accuracy) < 2 or accuracy.values[-1] >= 0.55:
        return None
    return f"{accuracy.values[-1]:.1%} of held-out pairs are in the right order."


def accuracy_gap(run: Run, training_metric: str) -> str | None:
    """Between training and held-out pairs, where it is above 0.15."""
    training = fifths(run.series(training_metric))
    held_out: Series = run.series("evaluation/pair_accuracy")
    if training is None or not len(held_out) or training[-1] - held_out.values[-1] <= 0.15:
        return None
    return f"{training[-1]:.1%} in training, {held_out.values[-1]:.1%} held out."


def _badly_calibrated(run: Run) -> str | None:
    error = run.series("evaluation/calibration_error")
    return f"It is {error.values[-1]:.2f}." if len(error) and error.values[-1] > 0.15 else None


HELD_OUT_RULE = Rule(
    title="The held-out loss rises again",
    when="evaluation/loss ends 2% or more above its lowest point",
    advice="The model learns its data by heart: stop at the lowest point, or take more data.",
    severity=Severity.WARNING,
    check=_learns_by_heart,
)

REWARD_RULES = (
    Rule(
        title="The reward model is no better than a coin",
        when="evaluation/pair_accuracy ends below 0.55",
        advice="PPO against it would learn noise. Check that chosen and rejected are not mixed up, and that both "
        "answers survive the length limit.",
        severity=Severity.PROBLEM,
        check=no_better_than_a_coin,
    ),
    Rule(
        title="Accuracy is much higher in training than held out",
        when="reward_model/pair_accuracy in its last fifth is more than 0.15 above the last evaluation/pair_accuracy",
        advice="Fewer epochs, a lower learning rate, or more pairs.",
        severity=Severity.WARNING,
        check=lambda run: accuracy_gap(run, "reward_model/pair_accuracy"),
    ),
    Rule(
        title="The reward model is surer than it should be",
        when="evaluation/calibration_error ends above 0.15",
        advice="Fewer epochs; a margin of 2 then means less than it says, so weigh the KL coefficient accordingly.",
        severity=Severity.WARNING,
        check=_badly_calibrated,
    ),
    HELD_OUT_RULE,
)

COMMON_RULES = (
    Rule(
        title="Updates were skipped",
        when="a count of skipped updates is above 0 anywhere",
        advice="A few do no harm. Many: lower the learning rate; gradients that are not finite point at the data or "
        "the precision.",
        severity=Severity.WARNING,
        check=lambda run: counted(
            run,
            "policy/skipped_updates",
            "value/skipped_updates",
            "sft/skipped_updates",
            "reward_model/skipped_updates",
            "dpo/skipped_updates",
        ),
    ),
    Rule(
        title="Some metrics were not finite",
        when="progress/non_finite_metrics is above 0 anywhere",
        advice="NaN or infinity in a statistic is often the first sign of divergence: see which metric is missing.",
        severity=Severity.WARNING,
        check=lambda run: counted(run, "progress/non_finite_metrics"),
    ),
)
