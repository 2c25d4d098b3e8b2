"""Decodes one token per row through all layers of a Llama-like model in a single call of a C kernel.

The kernel computes the formulas of `fused.py` on the model's own weights, which may change in place between two calls.
When a model is loaded, the probe compares the kernel's results with the model's own code.

Legend: B rows, D width, K head width.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers.cache_utils import Cache

from proximo.models.attention.cache import RowCache, RowLayout
from proximo.models.attention.packed import AttentionLayout
from proximo.models.cpu.fused_layers import FusedLayers, attention_options
from proximo.native import decoding as native
from proximo.native.library import kernels_for, pointer


class KernelDecoder:
    """Decodes for one model. It holds addresses of weights: make a new one if weights are replaced or hooks added."""

    def __init__(
        self, fused: FusedLayers, otherwise: Callable[[Tensor, Tensor, Cache, AttentionLayout], Tensor]
    ) -> None:
        """`otherwise` decodes if the kernel must not run, for example under a profiler or a dispatch mode."""
        model = fused.model
        layers = list(model.layers[: model.config.num_hidden_layers])
        attention, gated = layers[0].self_attn, layers[0].mlp
        self._otherwise = otherwise
        self._transformer = model
        self._weights = [
            weight.detach() for weight in model.parameters()
        ]  # keeps alive the memory that the kernel reads
        self._layers = (native.LayerPointers * len(layers))(*map(_layer, layers))
        self._model = native.ModelPointers(
            num_layers=len(layers),
            width=attention.q_proj.weight.shape[1],
            num_heads=attention.q_proj.weight.shape[0] // attention.head_dim,
            num_key_heads=attention.k_proj.weight.shape[0] // attention.head_dim,
            head_width=attention.head_dim,
            gated_width=gated.gate_proj.weight.shape[0],
            last_norm=pointer(model.norm.weight),
            last_epsilon=model.norm.variance_epsilon,
            layers=self._layers,
        )

    @classmethod
    def of(
        cls, fused: FusedLayers, otherwise: Callable[[Tensor, Tensor, Cache, AttentionLayout], Tensor]
    ) -> "KernelDecoder | None":
        """A decoder for these layers; None if there is no kernel for their weights.

        Every weight must be a plain contiguous parameter, and `layer_idx` must follow the order of the layers.
        """
        model = fused.model
        indices = [layer.self_attn.layer_idx for layer in model.layers[: model.config.num_hidden_layers]]
        readable = all(
            weight.is_contiguous() and type(weight) is torch.nn.Parameter and kernels_for(weight) is not None
            for weight in model.parameters()
        )
        return cls(fused, otherwise) if readable and indices == list(range(len(indices))) else None

    @torch.no_grad()
    def decode(
        self,
        token_ids: Int64[Tensor, "rows"],
        position_ids: Int64[Tensor, "rows"],
        cache: Cache,
        layout: AttentionLayout,
    ) -> Float[Tensor, "rows hidden"]:
        """token_ids and position_ids [B] -> hidden states [B, D] after the final norm.

        Writes the keys and values of the new tokens to the cache.
        """
        model = self._transformer
        kernels = kernels_for(model.embed_tokens.weight)
        if kernels is None or not isinstance(cache, RowCache):
            return self._otherwise(token_ids, position_ids, cache, layout)
        assert isinstance(layout, RowLayout)
        hidden = model.embed_tokens(token_ids)
        assert kernels_for(hidden) is not None, "a hook on the embedding made another kind of tensor"
        angles = model.rotary_emb(hidden[:, None], position_ids[:, None])
        # Both halves of a head are rotated by the same angles, so the kernel takes one half of them: [B, K / 2].
        cosines, sines = (factors.chunk(2, dim=-1)[0][:, 0].contiguous() for factors in angles)
        result = hidden.clone(
            memory_format=torch.contiguous_format
        )  # the kernel overwrites it; a hook may have kept the embedding
        native.decode(kernels, self._model, result, layout.positions, angles=(cosines, sines), cache=cache.pointers())
        layout.num_calls += self._model.num_layers
        return result


def _layer(layer: Any) -> native.LayerPointers:
    """Addresses of the weights of one layer, and its attention options."""
    attention, gated = layer.self_attn, layer.mlp
    options = attention_options(attention)
    linear = {"query": attention.q_proj, "key": attention.k_proj, "value": attention.v_proj}
    return native.LayerPointers(
        first_norm=pointer(layer.input_layernorm.weight),
        first_epsilon=layer.input_layernorm.variance_epsilon,
        **{name: pointer(module.weight) for name, module in linear.items()},
        **{f"{name}_bias": pointer(module.bias) for name, module in linear.items()},
        output=pointer(attention.o_proj.weight),
        scaling=1 / math.sqrt(attention.head_dim) if options.scaling is None else options.scaling,
        window=options.sliding_window or 0,
        second_norm=pointer(layer.post_attention_layernorm.weight),
        second_epsilon=layer.post_attention_layernorm.variance_epsilon,
        gate=pointer(gated.gate_proj.weight),
        up=pointer(gated.up_proj.weight),
        down=pointer(gated.down_proj.weight),
    )
