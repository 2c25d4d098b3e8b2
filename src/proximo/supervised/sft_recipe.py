"""The recipe of supervised fine-tuning, its metrics, curves and alarms. Without torch."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from proximo.config.data import TextDataConfig
from proximo.config.recipe import quantisation_conflicts, tokenizer_conflicts
from proximo.config.run import ModelConfig, OptimizerConfig
from proximo.metrics.definitions import DOWN, Curve, Metric, Trace, held_out
from proximo.metrics.shared_declarations import HELD_OUT_LOSS
from proximo.metrics.values import ExponentialMean, Mean, Sum
from proximo.supervised import alarm_checks as checks
from proximo.supervised.metrics import OVERFITTING_RULE, flat_loss_rule, spike_rule, supervised_metrics
from proximo.supervised.recipes import DropoutSection, SupervisedRecipe


class SFTConfig(DropoutSection):
    """How often and in which portions supervised fine-tuning goes through the examples."""

    rows_key: ClassVar[str] = "examples_per_step"

    examples_per_step: int = Field(32, ge=1)
    """Examples per update."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5, schedule="cosine")
    """Optimizer of the model."""


class SFTRecipe(SupervisedRecipe):
    """What `proximo sft` reads: the model, the examples, and how it trains on them."""

    section: ClassVar[str] = "sft"
    memory_settings: ClassVar[str] = "lower sft.tokens_per_microbatch, or set model.activation_checkpointing"

    model: ModelConfig
    """The model to train."""
    data: TextDataConfig
    """Training data."""
    sft: SFTConfig = SFTConfig()
    """Training settings."""

    def conflicts_of_models(self) -> Iterator[str]:
        yield from quantisation_conflicts(self.model, "model", self.run)
        if self.tokenizer.train_vocab_size is None:
            yield from tokenizer_conflicts(self.model, "model", self.tokenizer)
        elif self.model.path is not None:
            yield (
                "tokenizer.train_vocab_size makes a new tokenizer, whose ids do not fit trained weights: set "
                "model.config, or remove it"
            )


TRAINING = (
    Metric("sft/loss", Mean, "nats per token", DOWN),
    Metric("sft/perplexity", ExponentialMean, "perplexity", DOWN),
    Metric("sft/tokens", Sum, "tokens"),
)

EVALUATION = (
    HELD_OUT_LOSS,
    Metric("evaluation/perplexity", ExponentialMean, "perplexity", DOWN),
    Metric("evaluation/bits_per_character", Mean, "bits", DOWN),
)

CURVES = (
    Curve("loss", "Loss", "nats per token").draws(
        Trace("sft/loss", "training"),
        held_out("evaluation/loss"),
        healthy="Both curves fall and stay together. Held-out loss rising while the training loss falls: the model "
        "overfits, so use the lowest point.",
    ),
    Curve("bits", "Bits per character", "bits").draws(
        held_out("evaluation/bits_per_character"),
        healthy="Falls. Use this value to compare models: it does not depend on the tokenizer.",
    ),
)

RULES = (
    spike_rule("sft/loss", "sft.optimizer"),
    OVERFITTING_RULE,
    flat_loss_rule("sft/loss", "sft.optimizer", checks.FLAT_LOSS),
)

METRICS = supervised_metrics(
    "sft",
    "Supervised fine-tuning",
    TRAINING,
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


SCHEMA = SFTRecipe
