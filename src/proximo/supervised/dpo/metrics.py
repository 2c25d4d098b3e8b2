"""Metrics, curves and alarms of DPO."""

from proximo.metrics.curves import Curve, Section, Trace
from proximo.metrics.declared import CALIBRATION, HELD_OUT_LOSS, PAIRS
from proximo.metrics.definitions import DOWN, UP, Metric
from proximo.metrics.values import Mean, Sum
from proximo.supervised.alarm_checks import FLAT_PAIR_LOSS, Accuracy
from proximo.supervised.alarms import (
    OVERFITTING_RULE,
    UNLEARNED,
    UNLIKELY,
    chance_rule,
    flat_loss_rule,
    gap_rule,
    spike_rule,
    unlikely_rule,
)
from proximo.supervised.declared import calibration_curve, pair_curves, supervised_metrics

METRICS = (
    Metric("dpo/loss", Mean, "nats per pair", DOWN).means(
        "The DPO loss, mean over the pairs of the step. The reference has ln 2 = 0.693, or 1 / (4 beta^2) with "
        "dpo.loss: ipo."
    ),
    Metric("dpo/accuracy", Mean, "fraction", UP).means(
        "Fraction of pairs whose chosen answer has the higher implicit reward; a tie counts half."
    ),
    Metric("dpo/margin", Mean, "score", UP).means(
        "Mean over pairs of the chosen answer's implicit reward minus the rejected one's."
    ),
    Metric("dpo/reward_chosen", Mean, "score").means(
        "Mean implicit reward of the chosen answers: beta times policy log-prob minus reference log-prob."
    ),
    Metric("dpo/reward_rejected", Mean, "score").means("Mean implicit reward of the rejected answers."),
    Metric("dpo/logprob_chosen", Mean, "nats").means(
        "Mean log-prob of the whole chosen answers under the policy. The loss depends only on differences, so this may "
        "fall while the margin grows."
    ),
    Metric("dpo/logprob_rejected", Mean, "nats").means("Mean log-prob of the whole rejected answers under the policy."),
    Metric("dpo/pairs", Sum, "pairs").means("Number of pairs in the step."),
)

EVALUATION = (
    HELD_OUT_LOSS,
    *PAIRS,
    Metric("evaluation/logprob_chosen", Mean, "nats").means(
        "Mean log-prob of the whole chosen answers of the held-out pairs under the policy."
    ),
    Metric("evaluation/logprob_rejected", Mean, "nats").means(
        "Mean log-prob of the whole rejected answers of the held-out pairs under the policy."
    ),
    CALIBRATION,
)

CURVES = (
    *pair_curves(
        "dpo",
        "dpo/accuracy",
        healthy_accuracy="Starts at 0.5, where policy and reference are equal, and climbs. Training far above held "
        "out: overfitting.",
        healthy_loss="Starts at ln 2 = 0.69, or at 1 / (4 beta^2) with dpo.loss: ipo, and falls. Held-out loss "
        "rising: use the lowest point.",
    ),
    Curve(
        "rewards",
        "Implicit rewards of the two answers",
        "score",
        (Trace("dpo/reward_chosen", "chosen"), Trace("dpo/reward_rejected", "rejected")),
        guide=0.0,
    ).when_healthy(
        "The curves diverge. Ideally the chosen one stays at 0 or above; it is common that both fall, and harmless if "
        "the chosen one falls little."
    ),
    Curve(
        "logprobs",
        "Log-probs of the two answers, held out",
        "nats per answer",
        (Trace("evaluation/logprob_chosen", "chosen"), Trace("evaluation/logprob_rejected", "rejected")),
    ).when_healthy(
        "The rejected one falls. If the chosen one falls with it, likelihood moves to answers that are in no pair: "
        "read the policy's answers."
    ),
    calibration_curve(
        "evaluation/calibration_error",
        "Below about 0.05. Rising: the policy becomes overconfident.",
        section=Section.MORE,
    ),
)


ACCURACY = Accuracy("dpo/accuracy")

RULES = (
    spike_rule("dpo/loss", "dpo.optimizer"),
    flat_loss_rule("dpo/loss", "dpo.optimizer", FLAT_PAIR_LOSS),
    chance_rule(
        UNLEARNED,
        "The policy learned nothing that generalises beyond the training pairs. If the margin stays near 0, "
        "raise the learning rate; otherwise check that chosen and rejected are not swapped, and that neither is "
        "cut off by the length limit.",
        ACCURACY,
        *("dpo", "optimizer", "learning_rate"),
    ),
    gap_rule(ACCURACY, "Fewer epochs, a lower learning rate, a larger dpo.beta, label smoothing, or more pairs."),
    unlikely_rule(
        UNLIKELY,
        "The margin grew because both answers became unlikely, and the likelihood moved to texts that are in "
        "no pair. Raise dpo.beta, lower the learning rate or the number of epochs, or fine-tune on the chosen "
        "answers first.",
        "evaluation/logprob_chosen",
    ),
    OVERFITTING_RULE,
)

DPO_METRICS = supervised_metrics(
    "dpo",
    "DPO",
    METRICS,
    evaluation=EVALUATION,
    watched={
        "dpo/loss": "loss",
        "dpo/accuracy": "accuracy",
        "dpo/margin": "margin",
        "evaluation/pair_accuracy": "held-out accuracy",
        "dpo/logprob_chosen": "log-prob chosen",
    },
    before_after={
        "Pair accuracy": ("evaluation/pair_accuracy", "dpo/accuracy"),
        "Loss": ("evaluation/loss", "dpo/loss"),
        "Margin": ("evaluation/margin_mean", "dpo/margin"),
        "Log-prob of the chosen": ("evaluation/logprob_chosen", "dpo/logprob_chosen"),
        "Log-prob of the rejected": ("evaluation/logprob_rejected", "dpo/logprob_rejected"),
    },
    curves=CURVES,
    gradients="Falls as the pairs are learned.",
    rules=RULES,
)
