"""Value models and reward models: a backbone with a scalar head, which gives one number per token.

Legend: T packed tokens, S sequences, N response tokens, D width.
"""

import copy
import math
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.utils import skip_init

from proximo.distributed.world import whole
from proximo.errors import ModelError
from proximo.models.heads import wide_dtype
from proximo.models.language import LanguageModel, PackedModel
from proximo.models.lora import LoRAOptions, add_adapter, merged_copy
from proximo.models.packing import Packed, PackedResponses
from proximo.models.precision.placement import Precision
from proximo.models.transformers_model import base_of, is_adapted

if TYPE_CHECKING:  # transformers takes seconds to import
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel


_STEP_SEPARATOR = "step_separator"
"""The attribute of configurations that keeps the step separator."""


class HeadStart(StrEnum):
    """Initialisation of a new scalar head."""

    ZERO = "zero"
    """All values are 0 at first. The backbone gets a gradient from the second update on."""
    NORMAL = "normal"
    """N(0, 1 / (D + 1)), for reward models (arXiv:2009.01325, section 3.4)."""


class ScalarModel(PackedModel):
    """A transformers classifier with one label. Its head always trains."""

    def __init__(self, model: "PreTrainedModel | PeftModel", *, precision: Precision = Precision.FLOAT32) -> None:
        """Raises ModelError for a model with another number of labels, or without a linear `score` layer."""
        _scalar_head(base_of(model))
        super().__init__(model, precision=precision)

    def token_scores(self, packed: Packed, rows: Int64[Tensor, "rows"] | None = None) -> Float[Tensor, "rows"]:
        """The score at each token, [T] in at least float32, or [R] at the distinct flat indices `rows`."""
        return self.scores(self.backbone.packed(packed, rows=rows))

    def sequence_scores(self, packed: Packed) -> Float[Tensor, "sequences"]:
        """The score at the last token of each sequence, [S]. Ignores token ids, so the padding token may be EOS."""
        return self.token_scores(packed, packed.last_indices)

    def response_values(self, batch: PackedResponses) -> Float[Tensor, "states"]:
        """Values [N + S]: for each response, V before each token and one more after the last."""
        return self.token_scores(batch.packed, batch.value_positions)

    def scores(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch"]:
        """Apply the head only: hidden [..., D] -> [...] in at least float32."""
        # Under an adapter `score` is a wrapper of peft, which selects the trained copy when it is called.
        layer = self.base.get_submodule("score")
        weight = next(layer.parameters())
        with torch.autocast(hidden.device.type, enabled=False):
            return layer(hidden.to(weight.dtype)).to(wide_dtype(weight))[..., 0]

    def with_adapter(self, options: LoRAOptions) -> "ScalarModel":
        """The same model with LoRA on its backbone; the head trains in full and is saved with the adapter."""
        adapted = ScalarModel(add_adapter(self.base, options), precision=self.precision)
        adapted.backbone.balancing = self.backbone.balancing
        return adapted

    @property
    def head_is_zero(self) -> bool:
        """True if all weights of the head are 0, and therefore all scores."""
        return not any(whole(tensor).any() for tensor in self.trained_head())

    @torch.no_grad()
    def scale_head(self, factor: float) -> None:
        """Multiply every score by a factor: the head's tensors are scaled in place."""
        for tensor in self.trained_head():
            tensor.mul_(factor)

    def trained_head(self) -> list[nn.Parameter]:
        """Weight and, if there is one, bias of the head; under an adapter, of the copy that trains."""
        tensors = list(self.base.get_submodule("score").parameters())
        return [tensor for tensor in tensors if tensor.requires_grad] or tensors


def mark_steps(model: ScalarModel, separator: str) -> None:
    """Keep the text that ends a step in the configuration of a process reward model; it is saved with the model."""
    setattr(model.base.config, _STEP_SEPARATOR, separator)


def step_separator_of(config: "PreTrainedConfig") -> str | None:
    """The separator from `mark_steps` in a configuration; None for a model that was not trained to judge steps."""
    return getattr(config, _STEP_SEPARATOR, None)


def start_head(layer: nn.Linear, start: HeadStart, *, seed: int) -> None:
    """Fill a scalar head with zeros or with normal numbers that depend only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(layer.weight.shape, generator=generator) / math.sqrt(layer.in_features + 1)
    with torch.no_grad():
        layer.weight.copy_(torch.zeros_like(drawn) if start is HeadStart.ZERO else drawn)
        if layer.bias is not None:
            layer.bias.zero_()


def scalar_from_language_model(source: LanguageModel, start: HeadStart, *, seed: int = 0) -> ScalarModel:
    """A scalar model on a copy of the backbone, adapters merged in, with a fresh head.

    Raises ModelError for an architecture that transformers has no sequence-classification model for.
    """
    layers = merged_copy(source.model).base_model if is_adapted(source.model) else copy.deepcopy(source.base.base_model)
    model = scalar_over(layers, start, seed=seed, precision=source.precision)
    model.model.requires_grad_(True)
    model.backbone.balancing = source.backbone.balancing
    return model


def scalar_over(layers: nn.Module, start: HeadStart, *, seed: int, precision: Precision) -> ScalarModel:
    """A new head on the layers of a language model, without its output layer. The layers are shared, not copied.

    Raises ModelError for an architecture that transformers has no sequence-classification model for.
    """
    from transformers import PreTrainedModel

    if not isinstance(layers, PreTrainedModel):
        raise ModelError(f"a scalar head goes on layers of transformers, not on a {type(layers).__name__}")
    config = copy.deepcopy(layers.config)
    config.num_labels = 1
    _unpad(config)
    model = _empty_classifier(config)
    setattr(model, model.base_model_prefix, layers)
    weight = next(layers.parameters())
    width = _scalar_head(model).in_features
    # Constructing a plain nn.Linear would draw from the global generator.
    head = skip_init(nn.Linear, width, 1, bias=False, device=weight.device, dtype=wide_dtype(weight))
    start_head(head, start, seed=seed)
    model.set_submodule("score", head)
    return ScalarModel(model.eval(), precision=precision)


def _empty_classifier(config) -> "PreTrainedModel":
    """A classifier on the meta device, where nothing is allocated or drawn at random."""
    from transformers import AutoModelForSequenceClassification

    try:
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise no_classifier(config.model_type) from error


def no_classifier(model_type: str) -> ModelError:
    """The error for an architecture without a sequence-classification model in transformers."""
    return ModelError(
        f"a {model_type} model cannot carry a scalar head: transformers has no sequence-classification model of this "
        "type; start the value or reward model from another architecture"
    )


def _unpad(config) -> None:
    """Unset a padding token that equals EOS: transformers would score the token before the EOS."""
    text = config.get_text_config()
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    if text.pad_token_id in ends:
        text.pad_token_id = None


def _scalar_head(base: "PreTrainedModel") -> nn.Linear:
    """The `score` layer, below peft's wrapper if there is one."""
    name = type(base).__name__
    if "score" not in dict(base.named_children()):
        raise ModelError(f"{name} has no linear layer named score, so it cannot be packed as a scalar model")
    layer = base.get_submodule("score")
    layer = next(module for module in layer.modules() if isinstance(module, nn.Linear))
    if layer.out_features != 1:
        raise ModelError(
            f"a reward or value model gives one number, but this {base.config.model_type} classifier has "
            f"{layer.out_features} labels; train one with num_labels = 1"
        )
    return layer
