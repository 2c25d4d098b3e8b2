"""Metrics, curves and alarms of supervised fine-tuning."""

from proximo.metrics.curves import Curve, Section, Trace, held_out
from proximo.metrics.declared.curves import SPEED
from proximo.metrics.declared.evaluation import HELD_OUT_LOSS
from proximo.metrics.declared.rules import COMMON_RULES
from proximo.metrics.definitions import Better, Metric
from proximo.metrics.trainer_metrics import TrainerMetrics
from proximo.metrics.values import ExponentialMean, Last, Mean, Sum
from proximo.supervised import alarm_checks as checks
from proximo.supervised.alarms import OVERFITTING_RULE, flat_loss_rule, spike_rule

METRICS = (
    Metric(
        name="sft/loss",
        reduction=Mean,
        unit="nats per token",
        definition="Negative log-prob of the next token, mean over the tokens in the loss mask of the step.",
        better=Better.DOWN,
    ),
    Metric(
        name="sft/perplexity",
        reduction=ExponentialMean,
        unit="perplexity",
        definition="exp of sft/loss. It depends on the tokenizer; use bits per character to compare tokenizers.",
        better=Better.DOWN,
    ),
    Metric(
        name="sft/tokens",
        reduction=Sum,
        unit="tokens",
        definition="Number of tokens in the loss mask of the step.",
    ),
    Metric(
        name="sft/gradient_norm",
        reduction=Mean,
        unit="norm",
        definition="L2 norm of the gradient before clipping, mean over updates.",
    ),
    Metric(
        name="sft/learning_rate",
        reduction=Last,
        unit="per update",
        definition="Learning rate of the last update.",
    ),
    Metric(
        name="sft/skipped_updates",
        reduction=Sum,
        unit="updates",
        definition="Updates skipped because the gradient was not finite.",
        better=Better.DOWN,
    ),
)

EVALUATION = (
    HELD_OUT_LOSS,
    Metric(
        name="evaluation/perplexity",
        reduction=ExponentialMean,
        unit="perplexity",
        definition="exp of the mean nats per held-out token.",
        better=Better.DOWN,
    ),
    Metric(
        name="evaluation/bits_per_character",
        reduction=Mean,
        unit="bits",
        definition="Bits of all held-out tokens divided by the number of characters of their text: comparable "
        "between tokenizers.",
        better=Better.DOWN,
    ),
)

CURVES = (
    Curve(
        key="loss",
        title="Loss",
        unit="nats per token",
        traces=(Trace("sft/loss", "training"), held_out("evaluation/loss")),
        healthy="Both curves fall and stay together. Held-out loss rising while the training loss falls: the model "
        "overfits, so use the lowest point.",
    ),
    Curve(
        key="bits",
        title="Bits per character",
        unit="bits",
        traces=(held_out("evaluation/bits_per_character"),),
        healthy="Falls. Use this value to compare models: it does not depend on the tokenizer.",
    ),
    Curve(
        key="gradients",
        title="Gradient norm",
        unit="norm before clipping",
        traces=(Trace("sft/gradient_norm", "training"),),
        healthy="Falls from a high start, then steady.",
        section=Section.MORE,
    ),
    Curve(
        key="learning-rate",
        title="Learning rate",
        unit="per update",
        traces=(Trace("sft/learning_rate", "training"),),
        healthy="As set in the recipe.",
        section=Section.MORE,
    ),
)

RULES = (
    spike_rule("sft/loss", "sft.optimizer"),
    OVERFITTING_RULE,
    flat_loss_rule("sft/loss", "sft.optimizer", checks.FLAT_LOSS),
)

SFT_METRICS = TrainerMetrics(
    tables={"Supervised fine-tuning": METRICS},
    evaluation=EVALUATION,
    watched={
        "sft/loss": "loss",
        "evaluation/loss": "held-out loss",
        "evaluation/bits_per_character": "bits/char",
        "sft/gradient_norm": "gradient",
        "sft/learning_rate": "lr",
        "throughput/train_tokens_per_second": "tokens/s",
    },
    before_after={
        "Loss": ("evaluation/loss", "sft/loss"),
        "Bits per character": ("evaluation/bits_per_character",),
        "Perplexity": ("evaluation/perplexity", "sft/perplexity"),
    },
    curves=(*CURVES, *SPEED),
    rules=(*RULES, *COMMON_RULES),
)
