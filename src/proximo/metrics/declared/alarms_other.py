"""The rules for supervised and reward model training, and those that every run has. Not those of PPO."""

import math
from itertools import pairwise
from statistics import fmean, median, median_low

from proximo.metrics.alarms import Finding, Rule, Severity, counted, fifths
from proximo.metrics.formatting import format_number as number
from proximo.metrics.run_files import Run, Series, setting

COIN, UNLEARNED = "The reward model is no better than a coin", "The policy cannot tell held-out pairs apart"
BY_HEART, SKIPPED, NOT_FINITE = "The held-out loss rises again", "Updates were skipped", "Some metrics were not finite"
UNLIKELY, UNSURE = "The chosen answers become much less likely", "The reward model is surer than it should be"
AFTER_A_LEAP = (COIN, UNLEARNED, UNLIKELY, UNSURE, BY_HEART, SKIPPED, NOT_FINITE)
"""What follows where one step spoiled the model."""
STEPS_AFTER = 5
"""Steps from a leap on whose median loss shows it, so that one odd batch does not."""


def _learns_by_heart(run: Run) -> str | None:
    losses = run.series("evaluation/loss")
    if len(losses) < 3:
        return None
    best = min(losses.values)
    if losses.values[-1] < 1.02 * best + 0.005:  # a loss near 0 may double and mean nothing
        return None
    step = losses.steps[losses.values.index(best)]
    return f"It was lowest, {number(best)}, at step {step}, and is {number(losses.values[-1])} at the end."


def _leaps(run: Run, name: str) -> str | None:
    """From the lowest mean of three steps so far: after a random start a loss falls first, and may leap from there."""
    loss = run.series(name)
    values = loss.values
    noise = median([abs(later - earlier) for earlier, later in pairwise(values)] or [0.0])
    lowest = math.inf
    for place in range(1, len(loss) - 2):
        lowest = min(lowest, fmean(values[max(0, place - 3) : place]))
        after = median_low(values[place : place + STEPS_AFTER])
        if after > 1.25 * lowest + 0.1 + 4 * noise:
            leap = max(range(place, min(place + STEPS_AFTER, len(loss))), key=lambda at: values[at] - values[at - 1])
            return (
                f"It went from {number(lowest)} to {number(after)} at step {loss.steps[leap]}, by the update of the "
                f"step before, and ends at {number(fmean(values[-STEPS_AFTER:]))}."
            )
    return None


def leap_rule(loss: str, optimizer: str) -> Rule:
    """For the training loss of that name, whose learning rate stands in that section."""
    return Rule(
        title="The training loss leapt up",
        when=f"the median of {loss} over five steps is above the lowest mean of three steps before by a quarter, 0.1 "
        "and four times the median change from step to step",
        advice=f"A step was too large. Start again from before it with a tenth of {optimizer}.learning_rate or less, "
        "and with warmup_updates.",
        severity=Severity.PROBLEM,
        check=lambda run: _leaps(run, loss),
        explains=AFTER_A_LEAP,
    )


def no_better_than_a_coin(run: Run, training_metric: str, *rate: str) -> Finding | None:
    """Of held-out pairs; `rate` are the keys of the learning rate, which is to blame where training pairs fail too."""
    accuracy, training = run.series("evaluation/pair_accuracy"), fifths(run.series(training_metric))
    if len(accuracy) < 2 or accuracy.values[-1] >= 0.55:
        return None
    detail = f"{accuracy.values[-1]:.1%} of held-out pairs are in the right order"
    learning_rate = setting(run.config, *rate)
    if training is None or training[-1] >= 0.6 or learning_rate is None:
        return Finding(f"{detail}.")
    return Finding(
        f"{detail}, and {training[-1]:.1%} of training pairs.",
        f"It does not learn its training pairs either: {'.'.join(rate)}, now {learning_rate:g}, is far too high or too "
        "low, or chosen and rejected are mixed up.",
    )


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
    title=BY_HEART,
    when="evaluation/loss ends 2% and 0.005 nats or more above its lowest point",
    advice="The model learns its data by heart: stop at the lowest point, or take more data.",
    severity=Severity.WARNING,
    check=_learns_by_heart,
    trend=True,
)

SFT_RULES = (leap_rule("sft/loss", "sft.optimizer"), HELD_OUT_RULE)

REWARD_RULES = (
    leap_rule("reward_model/loss", "reward.optimizer"),
    Rule(
        title=COIN,
        when="evaluation/pair_accuracy ends below 0.55",
        advice="PPO against it would learn noise. Check that chosen and rejected are not mixed up, and that both "
        "answers survive the length limit.",
        severity=Severity.PROBLEM,
        check=lambda run: no_better_than_a_coin(
            run, "reward_model/pair_accuracy", "reward", "optimizer", "learning_rate"
        ),
        trend=True,
    ),
    Rule(
        title="Accuracy is much higher in training than held out",
        when="reward_model/pair_accuracy in its last fifth is more than 0.15 above the last evaluation/pair_accuracy",
        advice="Fewer epochs, a lower learning rate, or more pairs.",
        severity=Severity.WARNING,
        check=lambda run: accuracy_gap(run, "reward_model/pair_accuracy"),
        trend=True,
    ),
    Rule(
        title=UNSURE,
        when="evaluation/calibration_error ends above 0.15",
        advice="Fewer epochs; a margin of 2 then means less than it says, so weigh the KL coefficient accordingly.",
        severity=Severity.WARNING,
        check=_badly_calibrated,
        trend=True,
    ),
    HELD_OUT_RULE,
)

COMMON_RULES = (
    Rule(
        title=SKIPPED,
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
        title=NOT_FINITE,
        when="progress/non_finite_metrics is above 0 anywhere",
        advice="NaN or infinity in a statistic is often the first sign of divergence: log.txt names the metrics.",
        severity=Severity.WARNING,
        check=lambda run: counted(run, "progress/non_finite_metrics"),
    ),
)
