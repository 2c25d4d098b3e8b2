"""The recipe of DPO, its metrics, curves and alarms. Without torch."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from proximo.config.data import PreferenceDataConfig
from proximo.config.run import OptimizerConfig
from proximo.metrics.definitions import DOWN, UP, Curve, Metric, Section, Trace
from proximo.metrics.shared_declarations import CALIBRATION, HELD_OUT_LOSS, PAIRS
from proximo.metrics.values import Mean, Sum
from proximo.supervised.alarm_checks import FLAT_PAIR_LOSS, Accuracy
from proximo.supervised.metrics import (
    OVERFITTING_RULE,
    UNLEARNED,
    UNLIKELY,
    calibration_curve,
    chance_rule,
    flat_loss_rule,
    gap_rule,
    pair_curves,
    spike_rule,
    supervised_metrics,
    unlikely_rule,
)
from proximo.supervised.recipes import ReferenceRecipe, UpdateSection


class DPOConfig(UpdateSection):
    """Direct preference optimisation. The model's dropout is disabled, so policy and reference compute alike."""

    rows_key: ClassVar[str] = "pairs_per_step"

    pairs_per_step: int = Field(32, ge=1)
    """Pairs per update."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: the loss of DPO, which increases the margin of a pair without limit. `ipo`: drives the difference of
    the log-ratios to 1 / (2 beta)."""
    beta: float = Field(0.1, gt=0)
    """Reward of one nat of log-ratio to the reference: the smaller it is, the further the policy may move."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Expected fraction of wrong labels (conservative DPO); 0 trusts all labels."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-7, schedule="linear")
    """Optimizer of the policy."""

    def conflicts(self) -> Iterator[str]:
        if self.loss == "ipo" and self.label_smoothing:
            yield "label_smoothing needs loss: sigmoid; ipo has a fixed margin already: remove it"


class DPORecipe(ReferenceRecipe):
    """What `proximo dpo` reads: the policy, the preference pairs, and how it trains on them."""

    section: ClassVar[str] = "dpo"
    memory_settings: ClassVar[str] = "lower dpo.tokens_per_microbatch, or set model.activation_checkpointing"
    sequences_per_row: ClassVar[int] = 2

    data: PreferenceDataConfig
    """Preference pairs."""
    dpo: DPOConfig = DPOConfig()
    """Training settings."""


TRAINING = (
    Metric("dpo/loss", Mean, "nats per pair", DOWN),
    Metric("dpo/accuracy", Mean, "fraction", UP),
    Metric("dpo/margin", Mean, "score", UP),
    Metric("dpo/reward_chosen", Mean, "score"),
    Metric("dpo/reward_rejected", Mean, "score"),
    Metric("dpo/logprob_chosen", Mean, "nats"),
    Metric("dpo/logprob_rejected", Mean, "nats"),
    Metric("dpo/pairs", Sum, "pairs"),
)

EVALUATION = (
    HELD_OUT_LOSS,
    *PAIRS,
    Metric("evaluation/logprob_chosen", Mean, "nats"),
    Metric("evaluation/logprob_rejected", Mean, "nats"),
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
    Curve("rewards", "Implicit rewards of the two answers", "score", guide=0.0).draws(
        Trace("dpo/reward_chosen", "chosen"),
        Trace("dpo/reward_rejected", "rejected"),
        healthy="The curves diverge. Ideally the chosen one stays at 0 or above; it is common that both fall, and "
        "harmless if the chosen one falls little.",
    ),
    Curve("logprobs", "Log-probs of the two answers, held out", "nats per answer").draws(
        Trace("evaluation/logprob_chosen", "chosen"),
        Trace("evaluation/logprob_rejected", "rejected"),
        healthy="The rejected one falls. If the chosen one falls with it, likelihood moves to answers that are in no "
        "pair: read the policy's answers.",
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

METRICS = supervised_metrics(
    "dpo",
    "DPO",
    TRAINING,
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


SCHEMA = DPORecipe
