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
        definition="Pairwise loss, mean over the pairs of the step. ln 2 = 0.693 is the loss of a coin.",
        better=Better.DOWN,
    ),
    Metric(
        name="reward_model/pair_accuracy",
        reduction=Mean,
        unit="fraction",
        definition="Share of pairs whose chosen answer scores higher; a tie counts half.",
        better=Better.UP,
    ),
    Metric(
        name="reward_model/score_chosen_mean",
        reduction=Mean,
        unit="score",
        definition="Mean score of the chosen answers. Only differences mean anything: the loss does not fix the zero.",
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
        definition="Mean over pairs of chosen score minus rejected score. The log-odds that the model gives the pair.",
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
        definition="Pairs of the step.",
    ),
    Metric(
        name="reward_model/skipped_updates",
        reduction=Sum,
        unit="updates",
        definition="Updates left out because the gradient was not finite.",
        better=Better.DOWN,
    ),
)

CURVES = (
    Curve(
        key="accuracy",
        title="Pair accuracy",
        unit="fraction of pairs",
        traces=(Trace("reward_model/pair_accuracy", "training"), held_out("evaluation/pair_accuracy")),
        healthy="Held out well above 0.5, the level of a coin. It cannot pass the share of pairs that are labelled "
        "right; training far above held out is overfitting.",
        guide=0.5,
        share=True,
    ),
    Curve(
        key="loss",
        title="Loss",
        unit="nats per pair",
        traces=(Trace("reward_model/loss", "training"), held_out("evaluation/loss")),
        healthy="Starts at ln 2 = 0.69, the loss of a coin, and falls. Held out rising: stop at the lowest point.",
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
        healthy="They part. Only the distance means anything; both drifting one way does no harm unless it is far.",
    ),
    Curve(
        key="calibration-error",
        title="Calibration error",
        unit="fraction",
        traces=(held_out("evaluation/calibration_error"),),
        healthy="Below about 0.05. High with a good accuracy: the model is surer than it has reason to be.",
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
        healthy="As the recipe says.",
        section=Section.MORE,
    ),
)

RULES = (
    spike_rule("reward_model/loss", "reward.optimizer"),
    flat_loss_rule("reward_model/loss", "reward.optimizer", checks.FLAT_PAIR_LOSS),
    chance_rule(
        CHANCE,
        "PPO against it would learn noise. Check that chosen and rejected are not mixed up, and that both answers "
        "survive the length limit.",
        "reward_model/pair_accuracy",
        *("reward", "optimizer", "learning_rate"),
    ),
    gap_rule("reward_model/pair_accuracy", "Fewer epochs, a lower learning rate, or more pairs."),
    Rule(
        title=OVERCONFIDENT,
        when=f"in the second half of the run evaluation/calibration_error is above {checks.CALIBRATION_ERROR}, and "
        f"above {checks.BIN_NOISE} over the root of evaluation/pairs",
        advice="Fewer epochs; a margin of 2 then means less than it says, so weigh the KL coefficient accordingly.",
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
