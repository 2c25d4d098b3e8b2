"""Runs tokens over a cache of keys and values, through all layers of a model in a single call of a C kernel.

The kernel computes the formulas of `fused_functions.py`, in the same types. In float32 it reads the model's own
weights, which may change in place between two calls; matrices with an adapter, and those of GPT-2, are copied for it in
the form that it reads. In bf16 it reads the casts of the weights (`casting` in proximo/models/precision/compute.py),
and an adapter multiplies apart. When a model is loaded, the probe compares the kernel's results with the model's own
code.

Legend: B tokens, one or several for each row of the cache, D width, K head width.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers.cache_utils import Cache

from proximo.models.attention.cache import RowCache
from proximo.models.attention.cache_layouts import TokenLayout
from proximo.models.attention.packed import AttentionLayout
from proximo.models.fast_path import Decoder
from proximo_cpu import decode_call
from proximo_cpu.fused_layers import FusedLayers
from proximo_cpu.library import is_plain, kernels_for, library, pointer
from proximo_cpu.model_reader import LayerParts
from proximo_cpu.operators import Linear, Norm, RMSNorm
from proximo_cpu.row_kernels import ACTIVATIONS

_AT_ONCE = 128
"""Tokens of one call of the kernel, whose hidden states stay in the processor's cache."""
_MATRICES = ("query", "key", "value", "output", "down", "gate", "up")
"""The matrices of a layer, of which a layer without gate has no `up`."""


class KernelDecoder:
    """Decodes for one model.

    It holds addresses of weights, and copies of some. Make a new one if weights are replaced, hooks or adapters added,
    or weights of an adapter or of a GPT-2 changed; in bf16 also if any weight changed.
    """

    def __init__(self, fused: FusedLayers, otherwise: Decoder) -> None:
        """`otherwise` decodes if the kernel must not run, for example under a profiler or a dispatch mode."""
        parts = fused.parts
        self._otherwise = otherwise
        self._parts = parts
        self._in_bf16 = parts.layers[0].inputs.dtype is torch.bfloat16
        self._kept: list[Tensor] = []
        """Keeps alive the memory that the kernel reads."""
        self._layers = (decode_call.LayerPointers * len(parts.layers))(*map(self._layer, parts.layers))
        first = parts.layers[0]
        query, key, _ = first.inputs.projections
        self._embeddings = fused.model.get_input_embeddings().weight
        self._model = decode_call.ModelPointers(
            num_layers=len(parts.layers),
            width=self._embeddings.shape[1] if parts.finish is None else parts.finish.in_features,
            num_heads=query.num_outputs // first.inputs.head_width,
            num_key_heads=key.num_outputs // first.inputs.head_width,
            head_width=first.inputs.head_width,
            inner_width=first.rest.opened[0].num_outputs,
            in_bf16=self._in_bf16,
            largest_rank=max((rank for layer in self._layers for rank in _ranks(layer)), default=0),
            last=self._norm(parts.last_norm),
            layers=self._layers,
        )

    @classmethod
    def of(cls, fused: FusedLayers, otherwise: Decoder) -> "KernelDecoder | None":
        """A decoder for these layers; None if there is no kernel for their weights.

        Every weight must be a plain contiguous parameter, and `layer_idx` must follow the order of the layers.
        """
        layers = fused.parts.layers
        indices = [layer.attention.layer_idx for layer in layers]
        types = {torch.float32, torch.bfloat16} if layers[0].inputs.dtype is torch.bfloat16 else {torch.float32}
        readable = library() is not None and all(
            weight.is_contiguous() and type(weight) is torch.nn.Parameter and is_plain(weight) and weight.dtype in types
            for weight in fused.model.parameters()
        )
        known = all(layer.rest.activation.name in ACTIVATIONS for layer in layers)
        return cls(fused, otherwise) if readable and known and indices == list(range(len(indices))) else None

    @classmethod
    def decode_of(cls, fused: FusedLayers, otherwise: Decoder) -> Decoder | None:
        """`decode` of a decoder for these layers; None if there is no kernel for their weights."""
        decoder = cls.of(fused, otherwise)
        return None if decoder is None else decoder.decode

    @torch.no_grad()
    def decode(
        self,
        token_ids: Int64[Tensor, "tokens"],
        position_ids: Int64[Tensor, "tokens"],
        cache: Cache,
        layout: AttentionLayout,
    ) -> Float[Tensor, "tokens hidden"]:
        """token_ids and position_ids [B] -> hidden states [B, D] after the final norm.

        Writes the keys and values of the new tokens to the cache. Of each token the results are the same to the bit,
        whatever the others are.
        """
        kernels = library() if is_plain(self._embeddings) else None
        if kernels is None or not isinstance(cache, RowCache):
            return self._otherwise(token_ids, position_ids, cache, layout)
        assert isinstance(layout, TokenLayout)
        hidden = self._parts.embed(token_ids, position_ids)
        assert kernels_for(hidden) is not None, "a hook on the embedding made another kind of tensor"
        found = self._parts.angles(hidden, position_ids)
        angles = [_columns(*found[kind]) for kind in self._parts.kinds]
        # The kernel overwrites it, and a hook may have kept the embedding.
        result = hidden.clone(memory_format=torch.contiguous_format)
        for start in range(0, len(result), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            decode_call.decode(
                kernels,
                self._model,
                result[part],
                layout.positions[part],
                layout.rows[part],
                angles=[(cosines[part], sines[part]) for cosines, sines in angles],
                cache=cache.made_of_storage(decode_call.CachePointers.of),
            )
        layout.num_calls += self._model.num_layers
        return result if self._parts.finish is None else self._parts.finish(result)

    def _layer(self, layer: LayerParts) -> decode_call.LayerPointers:
        """Addresses of the weights of one layer, and its options."""
        inputs, rest, options = layer.inputs, layer.rest, layer.options
        linear = dict(zip(_MATRICES, (*inputs.projections, rest.output, rest.closed, *rest.opened), strict=False))
        norms = {
            "before_attention": inputs.norm,
            "after_attention": rest.after_attention,
            "before_mlp": rest.before_mlp,
            "after_mlp": rest.after_mlp,
        }
        if inputs.head_norms is not None:
            norms |= dict(zip(("of_queries", "of_keys"), inputs.head_norms, strict=True))
        return decode_call.LayerPointers(
            **{name: self._norm(norm) for name, norm in norms.items() if norm is not None},
            **{name: self._matrix(matrix) for name, matrix in linear.items()},
            scaling=1 / math.sqrt(inputs.head_width) if options.scaling is None else options.scaling,
            softcap=options.softcap or 0.0,
            window=options.sliding_window or 0,
            angles=-1 if layer.angles is None else self._parts.kinds.index(layer.angles),
            activation=ACTIVATIONS.index(rest.activation.name),
            norms_each_head=inputs.head_norms is not None and len(inputs.head_norms[0].weight) == inputs.head_width,
        )

    def _norm(self, norm: Norm) -> decode_call.NormPointers:
        own: dict[str, Any] = {"weight": self._address(norm.weight), "epsilon": norm.epsilon}
        if isinstance(norm, RMSNorm):
            return decode_call.NormPointers(kind=decode_call.RMS_NORM, offset=norm.offset, **own)
        return decode_call.NormPointers(kind=decode_call.LAYER_NORM, bias=self._address(norm.bias), **own)

    def _matrix(self, layer: Linear) -> decode_call.MatrixPointers:
        bias = None if layer.bias is None else layer.own_rows(layer.bias)
        with torch.no_grad():
            if self._in_bf16:
                return self._half_matrix(layer, bias)
            matrix = layer.matrix(torch.float32).contiguous()
        return decode_call.MatrixPointers(weight=self._address(matrix), bias=self._address(bias))

    def _half_matrix(self, layer: Linear, bias: Tensor | None) -> decode_call.MatrixPointers:
        own: dict[str, Any] = {}
        if (apart := layer.apart(torch.bfloat16)) is not None:
            down, up = (each.float() for each in apart[:2])
            own = {"down": self._address(down), "up": self._address(up), "rank": len(down), "scaling": apart[2]}
        matrix = layer.matrix(torch.bfloat16).contiguous()
        rounded = None if bias is None else bias.to(torch.bfloat16).float()
        return decode_call.MatrixPointers(weight=self._address(matrix), bias=self._address(rounded), **own)

    def _address(self, tensor: Tensor | None) -> int | None:
        if tensor is not None:
            self._kept.append(tensor.detach())
        return pointer(tensor)


def _ranks(layer: decode_call.LayerPointers) -> list[int]:
    """Of the adapters of a layer, 0 for a matrix without one."""
    return [getattr(layer, name).rank for name in _MATRICES]


def _columns(cosines: Tensor | None, sines: Tensor | None) -> tuple[Tensor, Tensor]:
    """[B, 1, K / 2] each -> [B, K / 2] contiguous."""
    assert cosines is not None, "a kind of angles has angles"
    assert sines is not None, "a kind of angles has angles"
    return cosines[:, 0].contiguous(), sines[:, 0].contiguous()
