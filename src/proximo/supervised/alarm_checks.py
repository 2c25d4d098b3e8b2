"""Checks behind the alarms of SFT, reward model training, DPO and KTO. The alarms' texts: metrics.py.

Only evaluations in the second half of a run are judged: before that, the model has hardly begun to learn. Thresholds
on shares of pairs take the number of pairs into account.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, median_low

from proximo.message_text import format_number as number
from proximo.metrics.alarms import Finding, fifth_noise, fifths
from proximo.metrics.run_files import Run, Series, setting

SPIKE_STEPS = 5
"""A spike is judged by the median loss of this many steps, so that a single odd batch raises no alarm."""
CHANCE_ACCURACY, LEARNED_ACCURACY = 0.55, 0.6
"""Held-out pair accuracy below the first means that nothing was learned; training accuracy above the second, that
something was."""
GAP, GAP_STANDARD_ERRORS = 0.15, 3
"""An accuracy gap must exceed the first value, and this many of its standard errors."""
CALIBRATION_ERROR, BIN_NOISE = 0.15, 2.5
"""A calibration error must exceed the first value, and the second divided by sqrt(pairs). The latter is twice the
error that a perfect model shows in ten bins, 0.4 * sqrt(10 / pairs)."""
CONSTANT_LOSS = 0.98
"""A held-out loss of steps above this fraction of the loss of a constant means that nothing was learned."""
FLAT_LOSS, FLAT_PAIR_LOSS, FLAT_LABEL_LOSS = 0.005, 0.00005, 0.00001
"""Smallest relative change of the held-out loss that counts as learning. The value for pairs is lower, since with noisy
labels a pairwise loss changes little even when the model learns; that for labelled answers is lower still, since their
loss is bounded."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The metrics of an accuracy, in training and on held-out data."""

    training: str
    held_out: str = "evaluation/pair_accuracy"
    rows: str = "pairs"
    """What the accuracy is over. It names the metrics that count them, `evaluation/pairs`."""
    of: str = "of"
    """What joins the share and the number of rows."""


def newest_evaluation(run: Run, name: str) -> tuple[int, float] | None:
    """Step and value of the last evaluation, or None if it is not in the second half of the run."""
    series = run.series(name)
    if not len(series) or not run.lines:
        return None
    total = run.total_steps or run.lines[-1]["step"]
    step = series.steps[-1]
    return (step, series.values[-1]) if step >= max(1, total / 2) else None


def overfits(run: Run) -> Finding | None:
    """A finding if the held-out loss has risen from its minimum by more than its noise."""
    losses, newest = run.series("evaluation/loss"), newest_evaluation(run, "evaluation/loss")
    if len(losses) < 3 or newest is None:
        return None
    best, rows = min(losses.values), _held_out_rows(run, "pairs") or _held_out_rows(run, "examples")
    # The absolute term: a loss near 0 may double without meaning. The last term: the standard deviation of the loss
    # over single pairs or answers is at most about as large as the loss itself.
    if newest[1] < best + max(0.02 * best + 0.005, best / math.sqrt(rows) if rows else 0.0):
        return None
    step = losses.steps[losses.values.index(best)]
    if step == 0:
        return Finding(
            f"It was {number(best)} before the first step, is {number(newest[1])} at step {newest[0]}, and was "
            "never lower.",
            "Training does not help on the held-out data: lower the learning rate, and check that training and "
            "held-out data are of the same kind.",
        )
    return Finding(f"It was lowest, {number(best)}, at step {step}, and is {number(newest[1])} at step {newest[0]}.")


def loss_is_flat(run: Run, training_loss: str, least: float) -> str | None:
    """Describes losses that changed by less than the fraction `least` of their start, held out and in training."""
    losses, newest = run.series("evaluation/loss"), newest_evaluation(run, "evaluation/loss")
    training = run.series(training_loss)
    means = fifths(training)
    if len(losses) < 2 or losses.steps[0] != 0 or newest is None or means is None or len(training) < 10:
        return None
    first = losses.values[0]
    if max(abs(value - first) for value in losses.values) > least * first:
        return None
    if means[0] - means[-1] > max(2 * fifth_noise(training), least * means[0]):
        return None
    return f"The held-out loss was {first:.4g} before the first step and is {newest[1]:.4g} at step {newest[0]}."


def loss_spike(run: Run, name: str) -> str | None:
    """Describes a spike of a training loss.

    A spike is measured from the lowest three-step mean before it, because a loss may fall first and spike later.
    """
    loss = run.series(name)
    values = loss.values
    noise = median([abs(later - earlier) for earlier, later in pairwise(values)] or [0.0])
    lowest = math.inf
    for start in range(1, len(loss) - 2):
        lowest = min(lowest, fmean(values[max(0, start - 3) : start]))
        after = median_low(values[start : start + SPIKE_STEPS])
        if after > 1.25 * lowest + 0.1 + 4 * noise:
            spike = max(range(start, min(start + SPIKE_STEPS, len(loss))), key=lambda i: values[i] - values[i - 1])
            return (
                f"It rose from {number(lowest)} to {number(after)} at step {loss.steps[spike]}, after the update "
                f"of the step before, and ends at {number(fmean(values[-SPIKE_STEPS:]))}."
            )
    return None


def is_at_chance(run: Run, accuracy: Accuracy, *rate: str) -> Finding | None:
    """A finding if held-out accuracy is at chance level.

    With fewer than 100 held-out rows, accuracy in training must be low too, since so few rows cannot tell a fair model
    from chance. `rate`: the config keys of the learning rate, for the advice.
    """
    newest = newest_evaluation(run, accuracy.held_out)
    if newest is None or newest[1] >= CHANCE_ACCURACY:
        return None
    trained = _trained_rows(run, accuracy, newest[0])
    fails_training = trained is not None and trained[0] < LEARNED_ACCURACY
    rows = _held_out_rows(run, accuracy.rows)
    if rows is not None and rows < 100 and not fails_training:
        return None
    detail = f"{newest[1]:.1%}{_of_rows(rows, accuracy)} are ranked correctly at step {newest[0]}"
    learning_rate = setting(run.config, *rate)
    if trained is None or not fails_training or learning_rate is None:
        return Finding(f"{detail}.")
    swapped = "chosen and rejected" if accuracy.rows == "pairs" else "the labels"
    return Finding(
        f"{detail}, and {trained[0]:.1%} {accuracy.of} training {accuracy.rows}.",
        f"The model does not learn its training {accuracy.rows} either: {'.'.join(rate)}, now {learning_rate:g}, is "
        f"far too high or too low, or {swapped} are swapped.",
    )


def accuracy_gap(run: Run, accuracy: Accuracy) -> str | None:
    """Describes a gap between training and held-out accuracy that the number of rows does not explain."""
    newest = newest_evaluation(run, accuracy.held_out)
    trained = None if newest is None else _trained_rows(run, accuracy, newest[0])
    if newest is None or trained is None:
        return None
    rows = _held_out_rows(run, accuracy.rows)
    error = math.hypot(_error_of_share(*trained), _error_of_share(newest[1], rows))
    if trained[0] - newest[1] <= max(GAP, GAP_STANDARD_ERRORS * error):
        return None
    return f"{trained[0]:.1%} in training, {newest[1]:.1%}{_of_rows(rows, accuracy)} at step {newest[0]}."


def become_unlikely(run: Run, logprob: str) -> str | None:
    """Describes held-out answers whose log-prob, the metric `logprob`, fell by more than a quarter of its start."""
    logprobs, newest = run.series(logprob), newest_evaluation(run, logprob)
    if len(logprobs) < 2 or newest is None:
        return None
    first, last = logprobs.values[0], newest[1]
    if last >= 1.25 * first:  # log-probs are negative: 25% lower is 1.25 times
        return None
    return f"From {number(first)} to {number(last)} nats per answer at step {newest[0]}."


def is_miscalibrated(run: Run) -> str | None:
    """Describes a calibration error above the noise of its bins."""
    newest, pairs = newest_evaluation(run, "evaluation/calibration_error"), _held_out_rows(run, "pairs")
    if newest is None or newest[1] <= max(CALIBRATION_ERROR, BIN_NOISE / math.sqrt(pairs) if pairs else 0.0):
        return None
    return f"It is {newest[1]:.2f} at step {newest[0]}."


def is_no_better_than_a_constant(run: Run) -> str | None:
    """Describes held-out losses of steps of which none was lower than that of giving every step the mean label.

    A model that learned something and then overfits is another matter.
    """
    newest, constant = newest_evaluation(run, "evaluation/loss"), newest_evaluation(run, "evaluation/constant_loss")
    steps = run.series("evaluation/steps")
    if newest is None or constant is None or steps.values[-1] < 100:
        return None
    if min(run.series("evaluation/loss").values) <= CONSTANT_LOSS * constant[1]:
        return None
    return (
        f"The loss of {number(steps.values[-1])} held-out steps is {newest[1]:.4g} at step {newest[0]}, and that of a "
        f"constant {constant[1]:.4g}."
    )


def _held_out_rows(run: Run, rows: str) -> float | None:
    """Number of held-out pairs or examples; None if the run did not record it or has none."""
    counts = run.series(f"evaluation/{rows}")
    return counts.values[-1] if len(counts) and counts.values[-1] > 0 else None


def _of_rows(count: float | None, accuracy: Accuracy) -> str:
    return f" {accuracy.of} {'the' if count is None else number(count)} held-out {accuracy.rows}"


def _trained_rows(run: Run, accuracy: Accuracy, until: int) -> tuple[float, float | None] | None:
    """Mean of a training share over the last fifth of the steps up to `until` (five or more), and the rows in it."""
    series = run.series(accuracy.training)
    values = [value for step, value in zip(series.steps, series.values, strict=True) if step <= until]
    if len(values) < 5:
        return None
    count = max(5, len(values) // 5)
    group = accuracy.training.partition("/")[0]
    return fmean(values[-count:]), _sum_until(run.series(f"{group}/{accuracy.rows}"), until, count)


def _sum_until(series: Series, until: int, count: int) -> float | None:
    values = [value for step, value in zip(series.steps, series.values, strict=True) if step <= until]
    return sum(values[-count:]) or None


def _error_of_share(share: float, count: float | None) -> float:
    """Standard error of a share of `count`. One added success and failure keep it above 0 for shares of 0 and 1."""
    if not count:
        return 0.0
    fair = (share * count + 1) / (count + 2)
    return math.sqrt(fair * (1 - fair) / count)
