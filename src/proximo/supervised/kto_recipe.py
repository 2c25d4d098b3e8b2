"""The recipe of KTO, its metrics, curves and alarms. Without torch."""

from typing import ClassVar, Literal

from pydantic import Field

from proximo.config.data import LabelledDataConfig
from proximo.config.run import OptimizerConfig
from proximo.message_text import format_number as number
from proximo.metrics.alarms import WARNING, Rule
from proximo.metrics.definitions import DOWN, UP, Curve, Metric, Section, Trace, held_out
from proximo.metrics.run_files import Run, setting
from proximo.metrics.shared_declarations import HELD_OUT_LOSS
from proximo.metrics.values import Mean, Sum
from proximo.supervised.alarm_checks import FLAT_LABEL_LOSS, Accuracy
from proximo.supervised.metrics import (
    OVERFITTING_RULE,
    UNLABELLED,
    UNLIKELY_DESIRABLE,
    chance_rule,
    flat_loss_rule,
    gap_rule,
    spike_rule,
    supervised_metrics,
    unlikely_rule,
)
from proximo.supervised.recipes import ReferenceRecipe, UpdateSection


class KTOConfig(UpdateSection):
    """Kahneman-Tversky optimisation. The model's dropout is disabled, so policy and reference compute alike."""

    rows_key: ClassVar[str] = "examples_per_step"

    examples_per_step: int = Field(32, ge=2)
    """Answers per update. The KL term is estimated over all of them."""
    beta: float = Field(0.1, gt=0)
    """Reward of one nat of log-ratio to the reference: the smaller it is, the further the policy may move."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of desirable answers in the loss (lambda_D)."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of undesirable answers in the loss (lambda_U)."""
    reference_point: Literal["kl", "zero"] = "kl"
    """What the reward of an answer is compared with. `kl`: the KL divergence from the reference, estimated with answers
    to other prompts, which takes another pass of both models. `zero`: 0, without that pass."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-6, schedule="linear")
    """Optimizer of the policy."""


class KTORecipe(ReferenceRecipe):
    """What `proximo kto` reads: the policy, the labelled answers, and how it trains on them."""

    section: ClassVar[str] = "kto"
    memory_settings: ClassVar[str] = "lower kto.tokens_per_microbatch, or set model.activation_checkpointing"

    data: LabelledDataConfig
    """Labelled answers."""
    kto: KTOConfig = KTOConfig()
    """Training settings."""

    @property
    def readings(self) -> dict[str, int]:
        """With a KL term both models also read every prompt with the answer to another one."""
        return {"reference": 2, "policy": 1} if self.kto.reference_point == "kl" else {"reference": 1}


ADVISED = (1.0, 4 / 3)
"""The range that arXiv:2402.01306 advises for `label_balance` (section 4.2)."""


def label_balance(
    num_desirable: float, num_undesirable: float, desirable_weight: float, undesirable_weight: float
) -> float:
    """lambda_D n_D / (lambda_U n_U): the weight of all desirable answers, by that of all undesirable ones.

    Infinite without undesirable answers.
    """
    if not num_undesirable:
        return float("inf")
    return desirable_weight * num_desirable / (undesirable_weight * num_undesirable)


LEAST_BALANCE, MOST_BALANCE = ADVISED[0] / 2, ADVISED[1] * 2
"""Beyond these balances of labels, twice as far as is advised, an alarm is raised."""
ENOUGH_ANSWERS = 100
"""Fewer answers than this may be unbalanced by chance."""


def _label_metrics(group: str) -> tuple[Metric, ...]:
    """The metrics of `label_metrics` (kto_trainer.py)."""
    return (
        Metric(f"{group}/reference_point", Mean, "nats"),
        Metric(f"{group}/auc", Mean, "fraction", UP),
        Metric(f"{group}/margin", Mean, "score", UP),
        Metric(f"{group}/reward_desirable", Mean, "score"),
        Metric(f"{group}/reward_undesirable", Mean, "score"),
        Metric(f"{group}/logprob_desirable", Mean, "nats"),
        Metric(f"{group}/logprob_undesirable", Mean, "nats"),
    )


TRAINING = (
    Metric("kto/loss", Mean, "weight", DOWN),
    *_label_metrics("kto"),
    Metric("kto/examples", Sum, "answers"),
    Metric("kto/desirable_fraction", Mean, "fraction"),
)

EVALUATION = (
    HELD_OUT_LOSS,
    Metric("evaluation/examples", Sum, "answers"),
    *_label_metrics("evaluation"),
)

CURVES = (
    Curve("auc", "AUC", "fraction of pairs of labels", share=True, guide=0.5).draws(
        Trace("kto/auc", "training"),
        held_out("evaluation/auc"),
        healthy="Starts at 0.5, where policy and reference are equal, and climbs. Training far above held out: "
        "overfitting.",
    ),
    Curve("loss", "Loss", "weight per answer").draws(
        Trace("kto/loss", "training"),
        held_out("evaluation/loss"),
        healthy="Starts at half of the mean weight, 0.5 with weights of 1, and falls. Held-out loss rising: use the "
        "lowest point.",
    ),
    Curve("rewards", "Implicit rewards, held out", "score", guide=0.0).draws(
        Trace("evaluation/reward_desirable", "desirable"),
        Trace("evaluation/reward_undesirable", "undesirable"),
        healthy="The curves diverge, ideally to both sides of 0. If both fall, undesirable answers weigh too much; if "
        "both rise, desirable ones do.",
    ),
    Curve("reference-point", "Reference point", "nats", from_zero=True).draws(
        Trace("kto/reference_point", "training"),
        held_out("evaluation/reference_point"),
        healthy="Near 0, since answers to other prompts gain little. A rise: the policy makes such answers likelier "
        "whatever the prompt is, and desirable answers have to gain more than that.",
    ),
    Curve("logprobs", "Log-probs of the answers, held out", "nats per answer").draws(
        Trace("evaluation/logprob_desirable", "desirable"),
        Trace("evaluation/logprob_undesirable", "undesirable"),
        healthy="The undesirable one falls, the desirable one stays or rises.",
    ),
    Curve("desirable-fraction", "Desirable answers", "fraction of a step", section=Section.MORE, share=True).draws(
        Trace("kto/desirable_fraction", "training"),
        healthy="Varies around the fraction in the data, by chance.",
    ),
)


def _is_unbalanced(run: Run) -> str | None:
    """Describes labels of which one weighs far more than the other, by the answers of all steps."""
    fractions, sizes = run.series("kto/desirable_fraction"), run.series("kto/examples")
    if not len(fractions) or len(fractions) != len(sizes):
        return None
    total = sum(sizes.values)
    if total < ENOUGH_ANSWERS:
        return None
    desirable = sum(fraction * size for fraction, size in zip(fractions.values, sizes.values, strict=True))
    weights = (setting(run.config, "kto", f"{name}_weight") for name in ("desirable", "undesirable"))
    ratio = label_balance(desirable, total - desirable, *(1.0 if weight is None else weight for weight in weights))
    if LEAST_BALANCE <= ratio <= MOST_BALANCE:
        return None
    return f"{desirable / total:.1%} of the answers are desirable; by weight they are {number(ratio)} to 1."


ACCURACY = Accuracy("kto/auc", "evaluation/auc", rows="examples", of="of the pairs among")

RULES = (
    Rule("One label outweighs the other", WARNING, _is_unbalanced).worded(
        when="the number of desirable answers times kto.desirable_weight, divided by the number of undesirable ones "
        f"times kto.undesirable_weight, is below {LEAST_BALANCE:g} or above {MOST_BALANCE:.3g}, over the answers of "
        f"all steps ({ENOUGH_ANSWERS} or more)",
        advice=f"Set kto.desirable_weight and kto.undesirable_weight so that it is {ADVISED[0]:g} to "
        f"{ADVISED[1]:.2f}: the loss is won by moving the likelihood of all answers the same way.",
    ),
    spike_rule("kto/loss", "kto.optimizer"),
    flat_loss_rule("kto/loss", "kto.optimizer", FLAT_LABEL_LOSS),
    chance_rule(
        UNLABELLED,
        "The policy learned nothing that generalises beyond the training answers. If the margin stays near 0, "
        "raise the learning rate; otherwise check that the labels are not swapped.",
        ACCURACY,
        *("kto", "optimizer", "learning_rate"),
    ),
    gap_rule(ACCURACY, "Fewer epochs, a lower learning rate, a larger kto.beta, or more answers."),
    unlikely_rule(
        UNLIKELY_DESIRABLE,
        "The likelihood moved to texts that are in no row. Lower kto.undesirable_weight or the learning rate, raise "
        "kto.beta, or fine-tune on the desirable answers first.",
        "evaluation/logprob_desirable",
    ),
    OVERFITTING_RULE,
)

METRICS = supervised_metrics(
    "kto",
    "KTO",
    TRAINING,
    evaluation=EVALUATION,
    watched={
        "kto/loss": "loss",
        "kto/auc": "AUC",
        "kto/margin": "margin",
        "evaluation/auc": "held-out AUC",
        "kto/reference_point": "z0",
    },
    before_after={
        "AUC": ("evaluation/auc", "kto/auc"),
        "Loss": ("evaluation/loss", "kto/loss"),
        "Margin": ("evaluation/margin", "kto/margin"),
        "Log-prob of the desirable": ("evaluation/logprob_desirable", "kto/logprob_desirable"),
        "Log-prob of the undesirable": ("evaluation/logprob_undesirable", "kto/logprob_undesirable"),
    },
    curves=CURVES,
    gradients="Falls as the answers are learned.",
    rules=RULES,
)


SCHEMA = KTORecipe
