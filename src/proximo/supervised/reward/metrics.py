"""Metrics, curves and alarms of reward model training."""

from proximo.metrics.alarms import Rule, Severity
from proximo.metrics.curves import Curve, Section, Trace, held_out
from proximo.metrics.declared.curves import SPEED
from proximo.metrics.declared.evaluation import CALIBRATION, HELD_OUT_LOSS, PAIRS
from proximo.metrics.declared.rules import COMMON_RULES
from proximo.metrics.definitions import Better, Metric
from proximo.metrics.trainer_metrics import TrainerMetrics
from proximo.metrics.values import Last, Mean, Sum
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

METRICS = (
    Metric(
        name="reward_model/loss",
        reduction=Mean,
        unit="nats per pair",
        definition="Pairwise loss, mean over the pairs of the step. ln 2 = 0.693 is the loss of random guessing.",
        better=Better.DOWN,
    ),
    Metric(
        name="reward_model/pair_accuracy",
        reduction=Mean,
        unit="fraction",
        definition="Fraction of pairs whose chosen answer scores higher; a tie counts half.",
        better=Better.UP,
    ),
    Metric(
        name="reward_model/score_chosen_mean",
        reduction=Mean,
        unit="score",
        definition="Mean score of the chosen answers. Only differences of scores have a meaning: the loss does not "
        "fix the zero.",
    ),
    Metric(
        name="reward_model/score_rejected_mean",
        reduction=Mean,
        unit="score",
        definition="Mean score of the rejected answers.",
    ),
    Metric(
        name="reward_model/margin_mean",
        reduction=Mean,
        unit="score",
        definition="Mean over pairs of chosen score minus rejected score: the log-odds that the model assigns to the "
        "pair.",
        better=Better.UP,
    ),
    Metric(
        name="reward_model/gradient_norm",
        reduction=Mean,
        unit="norm",
        definition="L2 norm of the gradient before clipping, mean over updates.",
    ),
    Metric(
        name="reward_model/learning_rate",
        reduction=Last,
        unit="per update",
        definition="Learning rate of the last update.",
    ),
    Metric(
        name="reward_model/pairs",
        reduction=Sum,
        unit="pairs",
        definition="Number of pairs in the step.",
    ),
    Metric(
        name="reward_model/skipped_updates",
        reduction=Sum,
        unit="updates",
        definition="Updates skipped because the gradient was not finite.",
        better=Better.DOWN,
    ),
)

CURVES = (
    Curve(
        key="accuracy",
        title="Pair accuracy",
        unit="fraction of pairs",
        traces=(Trace("reward_model/pair_accuracy", "training"), held_out("evaluation/pair_accuracy")),
        healthy="The held-out accuracy is well above 0.5, the level of random guessing. It cannot exceed the "
        "fraction of correctly labelled pairs. Training far above held out: overfitting.",
        guide=0.5,
        share=True,
    ),
    Curve(
        key="loss",
        title="Loss",
        unit="nats per pair",
        traces=(Trace("reward_model/loss", "training"), held_out("evaluation/loss")),
        healthy="Starts at ln 2 = 0.69, the loss of random guessing, and falls. Held-out loss rising: use the lowest "
        "point.",
        guide=0.6931471805599453,
    ),
    Curve(
        key="scores",
        title="Scores of the two answers",
        unit="score",
        traces=(
            Trace("reward_model/score_chosen_mean", "chosen"),
            Trace("reward_model/score_rejected_mean", "rejected"),
        ),
        healthy="The curves diverge. Only the distance has a meaning; a common drift is harmless unless it is large.",
    ),
    Curve(
        key="calibration-error",
        title="Calibration error",
        unit="fraction",
        traces=(held_out("evaluation/calibration_error"),),
        healthy="Below about 0.05. High with a good accuracy: the model is overconfident.",
    ),
    Curve(
        key="gradients",
        title="Gradient norm",
        unit="norm before clipping",
        traces=(Trace("reward_model/gradient_norm", "training"),),
        healthy="Steady.",
        section=Section.MORE,
    ),
    Curve(
        key="learning-rate",
        title="Learning rate",
        unit="per update",
        traces=(Trace("reward_model/learning_rate", "training"),),
        healthy="As set in the recipe.",
        section=Section.MORE,
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
    Rule(
        title=OVERCONFIDENT,
        when=f"in the second half of the run evaluation/calibration_error is above {checks.CALIBRATION_ERROR}, and "
        f"above {checks.BIN_NOISE} divided by the root of evaluation/pairs",
        advice="Use fewer epochs. A margin of 2 means less than it says, so choose the KL coefficient accordingly.",
        severity=Severity.WARNING,
        check=checks.is_miscalibrated,
    ),
    OVERFITTING_RULE,
)

REWARD_METRICS = TrainerMetrics(
    tables={"Reward model": METRICS},
    evaluation=(HELD_OUT_LOSS, *PAIRS, CALIBRATION),
    watched={
        "reward_model/loss": "loss",
        "reward_model/pair_accuracy": "accuracy",
        "reward_model/margin_mean": "margin",
        "evaluation/pair_accuracy": "held-out accuracy",
        "reward_model/gradient_norm": "gradient",
        "throughput/train_tokens_per_second": "tokens/s",
    },
    before_after={
        "Pair accuracy": ("evaluation/pair_accuracy", "reward_model/pair_accuracy"),
        "Loss": ("evaluation/loss", "reward_model/loss"),
        "Calibration error": ("evaluation/calibration_error",),
        "Margin": ("evaluation/margin_mean", "reward_model/margin_mean"),
    },
    curves=(*CURVES, *SPEED),
    rules=(*RULES, *COMMON_RULES),
)
