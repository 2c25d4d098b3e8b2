"""Metrics, curves and alarms of supervised fine-tuning."""

from proximo.metrics.curves import Curve, Trace, held_out
from proximo.metrics.declared.evaluation import HELD_OUT_LOSS
from proximo.metrics.definitions import Better, Metric
from proximo.metrics.values import ExponentialMean, Mean, Sum
from proximo.supervised import alarm_checks as checks
from proximo.supervised.alarms import OVERFITTING_RULE, flat_loss_rule, spike_rule
from proximo.supervised.declared import supervised_metrics

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
)

RULES = (
    spike_rule("sft/loss", "sft.optimizer"),
    OVERFITTING_RULE,
    flat_loss_rule("sft/loss", "sft.optimizer", checks.FLAT_LOSS),
)

SFT_METRICS = supervised_metrics(
    "sft",
    "Supervised fine-tuning",
    METRICS,
    evaluation=EVALUATION,
    watched={
        "sft/loss": "loss",
        "evaluation/loss": "held-out loss",
        "evaluation/bits_per_character": "bits/char",
        "sft/learning_rate": "lr",
    },
    before_after={
        "Loss": ("evaluation/loss", "sft/loss"),
        "Bits per character": ("evaluation/bits_per_character",),
        "Perplexity": ("evaluation/perplexity", "sft/perplexity"),
    },
    curves=CURVES,
    gradients="Falls from a high start, then steady.",
    rules=RULES,
)
