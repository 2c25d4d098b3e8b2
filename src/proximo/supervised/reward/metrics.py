"""Metrics, curves and alarms of reward model training."""

from proximo.metrics.alarms import WARNING, Rule
from proximo.metrics.curves import Curve, Trace
from proximo.metrics.declared import CALIBRATION, HELD_OUT_LOSS, PAIRS
from proximo.metrics.definitions import DOWN, UP, Metric
from proximo.metrics.values import Mean, Sum
from proximo.supervised import alarm_checks as checks
from proximo.supervised.alarms import (
    CHANCE,
    OVERCONFIDENT,
    OVERFITTING_RULE,
    chance_rule,
    flat_loss_rule,
    gap_rule,
    spike_rule,
)
from proximo.supervised.declared import calibration_curve, pair_curves, supervised_metrics

METRICS = (
    Metric("reward_model/loss", Mean, "nats per pair", DOWN).means(
        "Pairwise loss, mean over the pairs of the step. ln 2 = 0.693 is the loss of random guessing."
    ),
    Metric("reward_model/pair_accuracy", Mean, "fraction", UP).means(
        "Fraction of pairs whose chosen answer scores higher; a tie counts half."
    ),
    Metric("reward_model/score_chosen_mean", Mean, "score").means(
        "Mean score of the chosen answers. Only differences of scores have a meaning: the loss does not fix the zero."
    ),
    Metric("reward_model/score_rejected_mean", Mean, "score").means("Mean score of the rejected answers."),
    Metric("reward_model/margin_mean", Mean, "score", UP).means(
        "Mean over pairs of chosen score minus rejected score: the log-odds that the model assigns to the pair."
    ),
    Metric("reward_model/pairs", Sum, "pairs").means("Number of pairs in the step."),
)

CURVES = (
    *pair_curves(
        "reward_model",
        "reward_model/pair_accuracy",
        healthy_accuracy="The held-out accuracy is well above 0.5, the level of random guessing. It cannot exceed the "
        "fraction of correctly labelled pairs. Training far above held out: overfitting.",
        healthy_loss="Starts at ln 2 = 0.69, the loss of random guessing, and falls. Held-out loss rising: use the "
        "lowest point.",
    ),
    Curve(
        "scores",
        "Scores of the two answers",
        "score",
        (
            Trace("reward_model/score_chosen_mean", "chosen"),
            Trace("reward_model/score_rejected_mean", "rejected"),
        ),
    ).when_healthy(
        "The curves diverge. Only the distance has a meaning; a common drift is harmless unless it is large."
    ),
    calibration_curve(
        "evaluation/calibration_error", "Below about 0.05. High with a good accuracy: the model is overconfident."
    ),
)

ACCURACY = checks.Accuracy("reward_model/pair_accuracy")

RULES = (
    spike_rule("reward_model/loss", "reward.optimizer"),
    flat_loss_rule("reward_model/loss", "reward.optimizer", checks.FLAT_PAIR_LOSS),
    chance_rule(
        CHANCE,
        "PPO against it would learn noise. Check that chosen and rejected are not swapped, and that neither is "
        "cut off by the length limit.",
        ACCURACY,
        *("reward", "optimizer", "learning_rate"),
    ),
    gap_rule(ACCURACY, "Fewer epochs, a lower learning rate, or more pairs."),
    Rule(OVERCONFIDENT, WARNING, checks.is_miscalibrated).worded(
        when=f"in the second half of the run evaluation/calibration_error is above {checks.CALIBRATION_ERROR}, and "
        f"above {checks.BIN_NOISE} divided by the root of evaluation/pairs",
        advice="Use fewer epochs. A margin of 2 means less than it says, so choose the KL coefficient accordingly.",
    ),
    OVERFITTING_RULE,
)

REWARD_METRICS = supervised_metrics(
    "reward_model",
    "Reward model",
    METRICS,
    evaluation=(HELD_OUT_LOSS, *PAIRS, CALIBRATION),
    watched={
        "reward_model/loss": "loss",
        "reward_model/pair_accuracy": "accuracy",
        "reward_model/margin_mean": "margin",
        "evaluation/pair_accuracy": "held-out accuracy",
    },
    before_after={
        "Pair accuracy": ("evaluation/pair_accuracy", "reward_model/pair_accuracy"),
        "Loss": ("evaluation/loss", "reward_model/loss"),
        "Calibration error": ("evaluation/calibration_error",),
        "Margin": ("evaluation/margin_mean", "reward_model/margin_mean"),
    },
    curves=CURVES,
    gradients="Steady.",
    rules=RULES,
)
