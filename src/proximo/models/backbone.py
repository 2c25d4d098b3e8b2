"""The stack of layers below any head, run on packed or cached tokens. Not the heads.

Legend: T packed tokens, B rows of a decode step, D width.
"""

import warnings
from typing import Any

import torch
from jaxtyping import Float, Int64
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from proximo.errors import ModelError
from proximo.models.attention.packed import (
    ATTENTION,
    AttentionLayout,
    PackedLayout,
    attending,
    attending_again,
    register_attention,
)
from proximo.models.compilation import compile_layers
from proximo.models.context_length import position_limit
from proximo.models.fast_path import Decoder, FastPath, PackedLayers, fast_path
from proximo.models.packing import Packed
from proximo.models.precision.compute import Compute, Products, cast_weight, computing
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.transformers_logging import quiet_transformers


def base_of(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The transformers model itself, below an adapter if there is one. Raises ModelError for anything else."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(base, PreTrainedModel):
        raise ModelError(
            f"a model of transformers is wanted, got {type(model).__name__}: load it, for example with "
            "AutoModelForCausalLM.from_pretrained(path, dtype='float32')"
        )
    return base


def checkpoint_activations(base: PreTrainedModel) -> None:
    """Each layer keeps its input alone and runs again in the backward pass, in train mode.

    The non-reentrant kind: it needs no input with a gradient, so frozen embeddings (LoRA) are no trap. Raises
    ModelError for an architecture that cannot.
    """
    if not base.supports_gradient_checkpointing:
        raise ModelError(
            f"activation checkpointing is not possible with a {base.config.model_type} model; leave it off"
        )
    with warnings.catch_warnings():
        # Newer versions of transformers have another name for it, older ones only this.
        warnings.filterwarnings("ignore", message="`gradient_checkpointing_enable`", category=FutureWarning)
        base.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": attending_again}
        )


def _there_is_no_padding(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """In place of a method of transformers."""


class Backbone:
    """A transformers model without its head. Holds no weights of its own: layers and adapters stay with the model."""

    def __init__(self, model: PreTrainedModel | PeftModel, *, precision: Precision) -> None:
        register_attention()
        base = base_of(model)
        with quiet_transformers():  # it only warns where it cannot; the probe turns that into a refusal
            base.set_attn_implementation(ATTENTION)
        for module in base.modules():
            if isinstance(module, nn.Embedding):
                # There is no padding here, so a token that some configuration pads with trains like any other.
                module.padding_idx = None
        layers = base.base_model
        assert isinstance(layers, PreTrainedModel)
        # It would look for padding in every pass, to warn of what is not there.
        layers.warn_if_padding_and_no_attention_mask = _there_is_no_padding
        self.layers = layers
        self.training_layers: Any = layers
        """What runs where gradients are taken: the layers, or a compiled view of them."""
        self.precision = precision
        self._products = Products(layers)
        self.position_limit = position_limit(base.config)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.layers.device

    @property
    def path(self) -> FastPath:
        """How passes are computed on the device where the weights are."""
        return fast_path(self.device.type, self.precision)

    @property
    def is_compiled(self) -> bool:
        """True where passes with gradients run through torch.compile."""
        return self.training_layers is not self.layers

    @property
    def matrices(self) -> list[nn.Parameter]:
        """Of the layers' plain products, with their biases: what a pass in bf16 reads in bf16 alone."""
        return self._products.matrices

    @property
    def embeddings(self) -> list[nn.Parameter]:
        """The tables that a pass looks tokens and positions up in."""
        return self._products.embeddings

    def cast_weights(self) -> None:
        """Inside `casting` (compute.py): cast at once what the passes there would cast when they come to it."""
        if self.precision.is_half:
            for weight in self.matrices:
                cast_weight(weight, torch.bfloat16)

    def compile(self, backend: str) -> None:
        """Run the passes that take gradients through torch.compile; sampling and other passes stay as they are."""
        self.training_layers = compile_layers(self.layers, backend)

    def packed(
        self,
        packed: Packed,
        *,
        rows: Int64[Tensor, "rows"] | None = None,
        cache: Cache | None = None,
        layout: PackedLayout | None = None,
    ) -> Float[Tensor, "rows hidden"]:
        """Hidden states after the final norm: [T, D], or [R, D] of the flat indices `rows` [R], each given once.

        A cache gets the keys and values of all tokens. `layout`: None for the one that suits the device. Raises
        ModelError for a sequence beyond the positions.
        """
        longest = max(packed.lengths)
        if self.position_limit is not None and longest > self.position_limit:
            raise ModelError(
                f"a sequence of {longest} tokens was given to a {self.layers.config.model_type} model that reads at "
                f"most {self.position_limit} positions"
            )
        layout = layout or PackedLayout(packed.lengths, self.path.attention)
        fused = self._fused_layers()
        if fused is not None:
            return fused.run(packed, layout, rows=rows, cache=cache)
        hidden = self.run(packed.token_ids[None], packed.position_ids[None], layout=layout, cache=cache)[0]
        return hidden if rows is None else hidden[rows]

    def decoder(self) -> Decoder:
        """The fastest form of `decode` for the layers as they are now. Weights may change in place while it is used."""
        fused, make = self._fused_layers(), self.path.decoder
        kernel = None if fused is None or make is None else make(fused, self.decode)
        return self.decode if kernel is None else kernel.decode

    def decode(
        self,
        token_ids: Int64[Tensor, "rows"],
        position_ids: Int64[Tensor, "rows"],
        cache: Cache,
        layout: AttentionLayout,
    ) -> Float[Tensor, "rows hidden"]:
        """One more token for each row, by the modules: token_ids and position_ids [B] -> hidden states [B, D]."""
        return self.run(token_ids[:, None], position_ids[:, None], layout=layout, cache=cache)[:, 0]

    def _fused_layers(self) -> PackedLayers | None:
        """None where the modules run: on this path, for this model, or because they are compiled."""
        of = self.path.layers
        return None if of is None or self.is_compiled else of(self.layers)

    def run(
        self,
        token_ids: Int64[Tensor, "batch tokens"],
        position_ids: Int64[Tensor, "batch tokens"],
        *,
        layout: AttentionLayout,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch tokens hidden"]:
        """token_ids and position_ids [B, T] -> hidden states [B, T, D]."""
        layers = self.training_layers if torch.is_grad_enabled() and cache is None else self.layers
        compute = None
        if self.precision.is_half:
            compute = Compute(torch.bfloat16, self._products, is_compiled=layers is not self.layers)
        # Autocast is for what is no plain matrix product: experts, attention that an architecture spells out.
        half = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=compute is not None)
        with half, attending(layout), computing(compute):
            output = layers(
                input_ids=token_ids,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        return output.last_hidden_state
