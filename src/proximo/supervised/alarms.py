"""The rules that trainers with a loss share, with the names of their numbers filled in. Not what they look for."""

from proximo.metrics.alarms import Rule, Severity
from proximo.metrics.declared.rules import NOT_FINITE, SKIPPED
from proximo.supervised import alarm_checks as checks

COIN, UNLEARNED = "The reward model is no better than a coin", "The policy cannot tell held-out pairs apart"
BY_HEART = "The held-out loss rises again"
UNLIKELY, UNSURE = "The chosen answers become much less likely", "The reward model is surer than it should be"
GAP, STILL = "Accuracy is much higher in training than held out", "The loss does not fall"
BEYOND_THE_DATA = (UNLIKELY, UNSURE, BY_HEART)
"""What follows where pairs are learned one by one."""
AFTER_A_LEAP = (STILL, COIN, UNLEARNED, GAP, *BEYOND_THE_DATA, SKIPPED, NOT_FINITE)
"""What follows where one step spoiled the model."""


def leap_rule(loss: str, optimizer: str) -> Rule:
    """For the training loss of that name, whose learning rate stands in that section."""
    return Rule(
        title="The training loss leapt up",
        when=f"the median of {loss} over five steps is above the lowest mean of three steps before by a quarter, 0.1 "
        "and four times the median change from step to step",
        advice=f"A step was too large. Start again from before it with a tenth of {optimizer}.learning_rate or less, "
        "and with warmup_updates.",
        severity=Severity.PROBLEM,
        check=lambda run: checks.leaps(run, loss),
        explains=AFTER_A_LEAP,
    )


HELD_OUT_RULE = Rule(
    title=BY_HEART,
    when="in the second half of the run evaluation/loss is 2% and 0.005 nats or more above its lowest point; of pairs, "
    "also more than that point over the root of evaluation/pairs",
    advice="The model learns its data by heart: stop at the lowest point, or take more data.",
    severity=Severity.WARNING,
    check=checks.learns_by_heart,
)


def gap_rule(training_metric: str, advice: str) -> Rule:
    """For the training accuracy of that name."""
    return Rule(
        title=GAP,
        when=f"{training_metric}, over the last fifth of the steps until an evaluation in the second half of the run, "
        f"is more than {checks.GAP} and {checks.GAP_ERRORS} standard errors (of so many pairs) above its "
        "evaluation/pair_accuracy",
        advice=advice,
        severity=Severity.WARNING,
        check=lambda run: checks.accuracy_gap(run, training_metric),
        explains=BEYOND_THE_DATA,
    )


def coin_rule(title: str, advice: str, training_metric: str, *rate: str) -> Rule:
    """Of the trainer whose training accuracy has that name; `rate` are the keys of its learning rate."""
    return Rule(
        title=title,
        when=f"in the second half of the run evaluation/pair_accuracy is below {checks.COIN_SHARE}; with fewer than "
        f"100 held-out pairs only if {training_metric} is below {checks.TRAINED_SHARE} too",
        advice=advice,
        severity=Severity.PROBLEM,
        check=lambda run: checks.no_better_than_a_coin(run, training_metric, *rate),
        explains=(GAP, *BEYOND_THE_DATA),
    )


def still_rule(loss: str, optimizer: str, least: float) -> Rule:
    """For the training loss of that name, whose learning rate stands in that section."""
    return Rule(
        title=STILL,
        when=f"in the second half of the run no evaluation/loss was another than the first by more than {least:.3%} of "
        f"it, and {loss} does not fall by more than its noise (ten steps or more)",
        advice=f"Raise {optimizer}.learning_rate. If it is right, the data teach the model nothing that is new to it.",
        severity=Severity.WARNING,
        check=lambda run: checks.does_not_fall(run, loss, least),
        explains=(COIN, UNLEARNED),
    )
