"""The recipe of reward model training, its metrics, curves and alarms. Without torch."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from proximo.config.data import PreferenceDataConfig
from proximo.config.run import OptimizerConfig
from proximo.metrics.alarms import WARNING, Rule
from proximo.metrics.definitions import DOWN, UP, Curve, Metric, Trace
from proximo.metrics.shared_declarations import CALIBRATION, HELD_OUT_LOSS, PAIRS
from proximo.metrics.values import Mean, Sum
from proximo.supervised import alarm_checks as checks
from proximo.supervised.metrics import (
    CHANCE,
    OVERCONFIDENT,
    OVERFITTING_RULE,
    calibration_curve,
    chance_rule,
    flat_loss_rule,
    gap_rule,
    pair_curves,
    spike_rule,
    supervised_metrics,
)
from proximo.supervised.recipes import DropoutSection, ScalarRecipe


class RewardTrainingConfig(DropoutSection):
    """Training of a reward model on preference pairs."""

    rows_key: ClassVar[str] = "pairs_per_step"

    pairs_per_step: int = Field(32, ge=1)
    """Pairs per update."""
    loss: Literal["bradley_terry", "divergence_window"] = "bradley_terry"
    """`bradley_terry` compares the scores of the last tokens; `divergence_window` compares the scores of all tokens
    from the first difference of the answers on (as DeepSpeed-Chat)."""
    score_centring: float = Field(0.0, ge=0)
    """Weight of the squared sum of both scores, which keeps scores near 0; for `bradley_terry`."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5, schedule="linear")
    """Optimizer of the model."""

    def conflicts(self) -> Iterator[str]:
        if self.score_centring > 0 and self.loss != "bradley_terry":
            yield f"score_centring needs loss: bradley_terry; remove it with {self.loss}"


class RewardRecipe(ScalarRecipe):
    """What `proximo reward` reads: the model, the preference pairs, and how it trains on them."""

    section: ClassVar[str] = "reward"
    memory_settings: ClassVar[str] = "lower reward.tokens_per_microbatch, or set model.activation_checkpointing"
    sequences_per_row: ClassVar[int] = 2

    data: PreferenceDataConfig
    """Preference pairs."""
    reward: RewardTrainingConfig = RewardTrainingConfig()
    """Training settings."""


TRAINING = (
    Metric("reward_model/loss", Mean, "nats per pair", DOWN),
    Metric("reward_model/pair_accuracy", Mean, "fraction", UP),
    Metric("reward_model/score_chosen_mean", Mean, "score"),
    Metric("reward_model/score_rejected_mean", Mean, "score"),
    Metric("reward_model/margin_mean", Mean, "score", UP),
    Metric("reward_model/pairs", Sum, "pairs"),
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
    Curve("scores", "Scores of the two answers", "score").draws(
        Trace("reward_model/score_chosen_mean", "chosen"),
        Trace("reward_model/score_rejected_mean", "rejected"),
        healthy="The curves diverge. Only the distance has a meaning; a common drift is harmless unless it is large.",
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

METRICS = supervised_metrics(
    "reward_model",
    "Reward model",
    TRAINING,
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


SCHEMA = RewardRecipe
