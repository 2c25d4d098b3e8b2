"""The rules for supervised and reward model training, and those that every run has. Not those of PPO."""

from proximo.metrics.alarms import Rule, Severity, counted
from proximo.metrics.declared import supervised_checks as checks

COIN, UNLEARNED = "The reward model is no better than a coin", "The policy cannot tell held-out pairs apart"
BY_HEART, SKIPPED, NOT_FINITE = "The held-out loss rises again", "Updates were skipped", "Some metrics were not finite"
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


SFT_RULES = (
    leap_rule("sft/loss", "sft.optimizer"),
    HELD_OUT_RULE,
    still_rule("sft/loss", "sft.optimizer", checks.STILL),
)

REWARD_RULES = (
    leap_rule("reward_model/loss", "reward.optimizer"),
    still_rule("reward_model/loss", "reward.optimizer", checks.STILL_PAIRS),
    coin_rule(
        COIN,
        "PPO against it would learn noise. Check that chosen and rejected are not mixed up, and that both answers "
        "survive the length limit.",
        "reward_model/pair_accuracy",
        *("reward", "optimizer", "learning_rate"),
    ),
    gap_rule("reward_model/pair_accuracy", "Fewer epochs, a lower learning rate, or more pairs."),
    Rule(
        title=UNSURE,
        when=f"in the second half of the run evaluation/calibration_error is above {checks.MISCALIBRATED}, and above "
        f"{checks.BIN_NOISE} over the root of evaluation/pairs",
        advice="Fewer epochs; a margin of 2 then means less than it says, so weigh the KL coefficient accordingly.",
        severity=Severity.WARNING,
        check=checks.badly_calibrated,
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
            "Updates",
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
        check=lambda run: counted(run, "Metrics", "progress/non_finite_metrics"),
    ),
)
