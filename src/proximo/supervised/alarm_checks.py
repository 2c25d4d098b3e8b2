"""What the rules for SFT, reward model and DPO look for. A share is judged by how many pairs it is of, and never early.

An evaluation speaks for the run from half of its steps on: before, the model has hardly begun to learn.
"""

import math
from itertools import pairwise
from statistics import fmean, median, median_low

from proximo.metrics.alarms import Finding, fifth_noise, fifths
from proximo.metrics.formatting import format_number as number
from proximo.metrics.run_files import Run, Series, setting

STEPS_AFTER = 5
"""Steps from a leap on whose median loss shows it, so that one odd batch does not."""
COIN_SHARE, TRAINED_SHARE = 0.55, 0.6
"""Below the first of held-out pairs in the right order nothing was learned; above the second of training pairs,
something was."""
GAP, GAP_ERRORS = 0.15, 3
"""A gap must be above this, and above so many of its standard errors."""
MISCALIBRATED, BIN_NOISE = 0.15, 2.5
"""A calibration error must be above the first, and above the second over the root of the pairs: twice what ten bins of
a perfect model show, 0.4 * sqrt(10 / pairs)."""
STILL, STILL_PAIRS = 0.005, 0.00005
"""The part of the held-out loss that it must have moved by. Of pairs less: labels that are noise leave it where it is
too, but not so exactly."""


def newest_evaluation(run: Run, name: str) -> tuple[int, float] | None:
    """Step and value, where that step is in the second half of the run."""
    series = run.series(name)
    if not len(series) or not run.lines:
        return None
    total = run.total_steps or run.lines[-1]["step"]
    step = series.steps[-1]
    return (step, series.values[-1]) if step >= max(1, total / 2) else None


def learns_by_heart(run: Run) -> Finding | None:
    """The held-out loss is above its lowest point by more than its noise over so many pairs."""
    losses, newest = run.series("evaluation/loss"), newest_evaluation(run, "evaluation/loss")
    if len(losses) < 3 or newest is None:
        return None
    best, pairs = min(losses.values), _held_out_pairs(run)
    # A loss near 0 may double and mean nothing; that of a pair varies by about its own size.
    if newest[1] < best + max(0.02 * best + 0.005, best / math.sqrt(pairs) if pairs else 0.0):
        return None
    step = losses.steps[losses.values.index(best)]
    if step == 0:
        return Finding(
            f"It was {number(best)} before the first step, is {number(newest[1])} at step {newest[0]}, and was never "
            "lower.",
            "What is trained on does not help on what is held out: lower the learning rate, and see whether the two "
            "are of one kind.",
        )
    return Finding(f"It was lowest, {number(best)}, at step {step}, and is {number(newest[1])} at step {newest[0]}.")


def does_not_fall(run: Run, training_loss: str, least: float) -> str | None:
    """Neither the held-out loss nor that of training is another than it was at the start, by the part `least` of it."""
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


def leaps(run: Run, name: str) -> str | None:
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


def no_better_than_a_coin(run: Run, training_metric: str, *rate: str) -> Finding | None:
    """Of held-out pairs; `rate` are the keys of the learning rate, which is to blame where training pairs fail too.

    Fewer than a hundred held-out pairs cannot tell a coin from a fair model: then the training pairs must fail too.
    """
    newest = newest_evaluation(run, "evaluation/pair_accuracy")
    if newest is None or newest[1] >= COIN_SHARE:
        return None
    trained = _trained_pairs(run, training_metric, newest[0])
    fails_training = trained is not None and trained[0] < TRAINED_SHARE
    pairs = _held_out_pairs(run)
    if pairs is not None and pairs < 100 and not fails_training:
        return None
    detail = f"{newest[1]:.1%}{_of_pairs(pairs)} are in the right order at step {newest[0]}"
    learning_rate = setting(run.config, *rate)
    if trained is None or not fails_training or learning_rate is None:
        return Finding(f"{detail}.")
    return Finding(
        f"{detail}, and {trained[0]:.1%} of training pairs.",
        f"It does not learn its training pairs either: {'.'.join(rate)}, now {learning_rate:g}, is far too high or too "
        "low, or chosen and rejected are mixed up.",
    )


def accuracy_gap(run: Run, training_metric: str) -> str | None:
    """Between held-out pairs and those trained on shortly before, beyond what so many pairs show by chance."""
    newest = newest_evaluation(run, "evaluation/pair_accuracy")
    trained = None if newest is None else _trained_pairs(run, training_metric, newest[0])
    if newest is None or trained is None:
        return None
    pairs = _held_out_pairs(run)
    error = math.hypot(_error_of_share(*trained), _error_of_share(newest[1], pairs))
    if trained[0] - newest[1] <= max(GAP, GAP_ERRORS * error):
        return None
    return f"{trained[0]:.1%} in training, {newest[1]:.1%}{_of_pairs(pairs)} at step {newest[0]}."


def badly_calibrated(run: Run) -> str | None:
    """By more than the noise of its bins."""
    newest, pairs = newest_evaluation(run, "evaluation/calibration_error"), _held_out_pairs(run)
    if newest is None or newest[1] <= max(MISCALIBRATED, BIN_NOISE / math.sqrt(pairs) if pairs else 0.0):
        return None
    return f"It is {newest[1]:.2f} at step {newest[0]}."


def _held_out_pairs(run: Run) -> float | None:
    """None in runs that did not record it, and in those without pairs."""
    pairs = run.series("evaluation/pairs")
    return pairs.values[-1] if len(pairs) and pairs.values[-1] > 0 else None


def _of_pairs(pairs: float | None) -> str:
    return " of the held-out pairs" if pairs is None else f" of {number(pairs)} held-out pairs"


def _trained_pairs(run: Run, metric: str, until: int) -> tuple[float, float | None] | None:
    """The share of the last fifth of the steps until then, five at least, and how many pairs those had."""
    series = run.series(metric)
    values = [value for step, value in zip(series.steps, series.values, strict=True) if step <= until]
    if len(values) < 5:
        return None
    count = max(5, len(values) // 5)
    return fmean(values[-count:]), _sum_until(run.series(f"{metric.partition('/')[0]}/pairs"), until, count)


def _sum_until(series: Series, until: int, count: int) -> float | None:
    values = [value for step, value in zip(series.steps, series.values, strict=True) if step <= until]
    return sum(values[-count:]) or None


def _error_of_share(share: float, count: float | None) -> float:
    """The standard error; a right and a wrong one more keep it from being 0 at the ends."""
    if not count:
        return 0.0
    fair = (share * count + 1) / (count + 2)
    return math.sqrt(fair * (1 - fair) / count)
