"""Metrics, curves and alarms of supervised fine-tuning."""

from proximo.metrics.curves import Curve, Trace, held_out
from proximo.metrics.declared import HELD_OUT_LOSS
from proximo.metrics.definitions import DOWN, Metric
from proximo.metrics.values import ExponentialMean, Mean, Sum
from proximo.supervised import alarm_checks as checks
from proximo.supervised.alarms import OVERFITTING_RULE, flat_loss_rule, spike_rule
from proximo.supervised.declared import supervised_metrics

METRICS = (
    Metric("sft/loss", Mean, "nats per token", DOWN).means(
        "Negative log-prob of the next token, mean over the tokens in the loss mask of the step."
    ),
    Metric("sft/perplexity", ExponentialMean, "perplexity", DOWN).means(
        "exp of sft/loss. It depends on the tokenizer; use bits per character to compare tokenizers."
    ),
    Metric("sft/tokens", Sum, "tokens").means("Number of tokens in the loss mask of the step."),
)

EVALUATION = (
    HELD_OUT_LOSS,
    Metric("evaluation/perplexity", ExponentialMean, "perplexity", DOWN).means(
        "exp of the mean nats per held-out token."
    ),
    Metric("evaluation/bits_per_character", Mean, "bits", DOWN).means(
        "Bits of all held-out tokens divided by the number of characters of their text: comparable between tokenizers."
    ),
)

CURVES = (
    Curve("loss", "Loss", "nats per token", (Trace("sft/loss", "training"), held_out("evaluation/loss"))).when_healthy(
        "Both curves fall and stay together. Held-out loss rising while the training loss falls: the model overfits, "
        "so use the lowest point."
    ),
    Curve("bits", "Bits per character", "bits", (held_out("evaluation/bits_per_character"),)).when_healthy(
        "Falls. Use this value to compare models: it does not depend on the tokenizer."
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
