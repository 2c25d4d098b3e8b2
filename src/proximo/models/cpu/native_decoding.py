"""One more token for each row through all layers in one call of a kernel in C. The formulas are in `decoding.py`."""

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from proximo.models.attention.cache import RowCache, RowLayout
from proximo.models.cpu.fused_layers import FusedLayers, attention_options
from proximo.native import decoding as native
from proximo.native.library import pointer


class NativeLayers:
    """Where the weights of a model lie, which may move on in place."""

    def __init__(self, fused: FusedLayers) -> None:
        model = fused.model
        layers = list(model.layers[: model.config.num_hidden_layers])
        attention, gated = layers[0].self_attn, layers[0].mlp
        self._weights = [each.detach() for each in model.parameters()]  # kept alive, as all that is pointed to
        self._layers = (native.Layer * len(layers))(*map(_layer, layers))
        self._model = native.Model(
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

    def run(
        self, kernels: ctypes.CDLL, hidden: Tensor, angles: tuple[Tensor, Tensor], cache: RowCache, layout: RowLayout
    ) -> None:
        """hidden [B, D]: embeddings in, states after the final norm out; angles: cosines and sines [B, K / 2]."""
        native.decode(kernels, self._model, hidden, layout.positions, angles=angles, cache=cache.pointers())
        layout.num_calls += self._model.num_layers


def _layer(layer: Any) -> native.Layer:
    attention, gated = layer.self_attn, layer.mlp
    options = attention_options(attention)
    linear = {"query": attention.q_proj, "key": attention.k_proj, "value": attention.v_proj}
    return native.Layer(
        first_norm=pointer(layer.input_layernorm.weight),
        first_epsilon=layer.input_layernorm.variance_epsilon,
        **{name: pointer(each.weight) for name, each in linear.items()},
        **{f"{name}_bias": pointer(each.bias) for name, each in linear.items()},
        output=pointer(attention.o_proj.weight),
        scaling=1 / math.sqrt(attention.head_dim) if options.scaling is None else options.scaling,
        window=options.sliding_window or 0,
        second_norm=pointer(layer.post_attention_layernorm.weight),
        second_epsilon=layer.post_attention_layernorm.variance_epsilon,
        gate=pointer(gated.gate_proj.weight),
        up=pointer(gated.up_proj.weight),
        down=pointer(gated.down_proj.weight),
    )


def is_plain(fused: FusedLayers) -> bool:
    """True where every weight lies row after row and layers are numbered in their order, as the kernel takes them."""
    model = fused.model
    indices = [layer.self_attn.layer_idx for layer in model.layers[: model.config.num_hidden_layers]]
    rows = all(each.is_contiguous() and type(each) is torch.nn.Parameter for each in model.parameters())
    return rows and indices == list(range(len(indices)))
