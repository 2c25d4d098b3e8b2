"""One more token for each row through the layers of Llama, Mistral and Qwen2, in few operators. Not for training.

The formulas and weights of `fused.py` without autograd's bookkeeping. A pass of few tokens costs as much in calls as
in arithmetic, so what is saved here are calls: of modules, and of small operators. Which models run this way is
decided in `fused_layers.py`; the probe at load holds what is computed here against the model's own code.

Legend: B rows, D width, H query heads, G key heads, K head width, F width of the gated layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache

from proximo.models.attention.cache import RowCache, RowLayout
from proximo.models.attention.packed import AttentionLayout, AttentionOptions
from proximo.models.cpu.fused import rotate_
from proximo.models.cpu.fused_layers import FusedLayers, attention_options
from proximo.models.cpu.native_decoding import NativeLayers, is_plain
from proximo.native.library import kernels_for


@dataclass(frozen=True, slots=True)
class _Norm:
    """w * h / sqrt(mean(h^2) + epsilon) of each row: [B, D] -> [B, D]."""

    weight: Tensor
    epsilon: Tensor
    """[1]."""

    @classmethod
    def of(cls, module: Any) -> "_Norm":
        return cls(module.weight, module.weight.new_full((1,), module.variance_epsilon))

    def __call__(self, hidden: Tensor) -> Tensor:
        lengths = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        inverse = torch.addcmul(self.epsilon, lengths, lengths, value=1 / hidden.shape[-1]).rsqrt_()
        return torch.mul(hidden, inverse).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights, [inputs, outputs] each: views of the modules' own, gathered because a look-up in a module
    costs as much as a small operator."""

    index: int
    options: AttentionOptions
    first_norm: _Norm
    projections: tuple[tuple[Tensor, Tensor | None], ...]
    """Weight and bias of queries, keys and values."""
    output: Tensor
    second_norm: _Norm
    gate: Tensor
    up: Tensor
    down: Tensor

    @classmethod
    def of(cls, layer: Any) -> "_Layer":
        attention, gated = layer.self_attn, layer.mlp
        linear = (attention.q_proj, attention.k_proj, attention.v_proj)
        return cls(
            index=attention.layer_idx,
            options=attention_options(attention),
            first_norm=_Norm.of(layer.input_layernorm),
            projections=tuple((each.weight.t(), each.bias) for each in linear),
            output=attention.o_proj.weight.t(),
            second_norm=_Norm.of(layer.post_attention_layernorm),
            gate=gated.gate_proj.weight.t(),
            up=gated.up_proj.weight.t(),
            down=gated.down_proj.weight.t(),
        )


class DecodingLayers:
    """The layers of one model as they are now: made anew after weights were replaced, or hooks and adapters added."""

    def __init__(self, fused: FusedLayers) -> None:
        model = fused.model
        self._model = model
        self._layers = [_Layer.of(each) for each in model.layers[: model.config.num_hidden_layers]]
        self._last_norm = _Norm.of(model.norm)
        self._native = NativeLayers(fused) if is_plain(fused) else None

    @torch.no_grad()
    def run(self, token_ids: Tensor, position_ids: Tensor, cache: Cache, layout: AttentionLayout) -> Tensor:
        """token_ids and position_ids [B] -> hidden states [B, D] after the final norm.

        The cache gets the keys and values of the new tokens.
        """
        hidden = self._model.embed_tokens(token_ids)
        angles = self._model.rotary_emb(hidden[:, None], position_ids[:, None])
        halves = [each.chunk(2, dim=-1)[0] for each in angles]  # both halves of a head turn by the same
        kernels = kernels_for(hidden)
        if kernels is not None and self._native is not None and isinstance(cache, RowCache):
            assert isinstance(layout, RowLayout)
            cosines, sines = (each[:, 0].contiguous() for each in halves)
            result = hidden.clone(memory_format=torch.contiguous_format)  # the embedding's own may be hooked
            self._native.run(kernels, result, (cosines, sines), cache, layout)
            return result
        for layer in self._layers:
            query, key, value = _projected(layer.first_norm(hidden), layer, halves)
            key, value = cache.update(key, value, layer.index)
            layout.num_calls += 1
            attended = layout.attend(query, key, value, layer.options)
            hidden = torch.addmm(hidden, attended.flatten(1), layer.output)
            hidden = _gated(hidden, layer.second_norm(hidden), layer)
        return self._last_norm(hidden)


def _gated(hidden: Tensor, normed: Tensor, layer: _Layer) -> Tensor:
    opened = functional.silu(torch.mm(normed, layer.gate), inplace=True)
    return torch.addmm(hidden, opened.mul_(torch.mm(normed, layer.up)), layer.down)


def _projected(normed: Tensor, layer: _Layer, halves: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with rotary positions: [B, H, 1, K] and [B, G, 1, K] twice."""
    for_query, for_key, for_value = layer.projections
    sizes = [for_query[0].shape[1], for_key[0].shape[1]]
    joined = normed.new_empty(normed.shape[0], sum(sizes))  # queries and keys turn together
    for part, linear in zip(joined.split(sizes, dim=1), (for_query, for_key), strict=True):
        _product(normed, *linear, out=part)
    width = 2 * halves[0].shape[-1]
    heads = joined.unflatten(1, (-1, width))
    rotate_(heads, *halves)
    query, key = heads[:, :, None].split([size // width for size in sizes], dim=1)
    return query, key, _product(normed, *for_value).unflatten(1, (-1, 1, width))


def _product(normed: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    return torch.mm(normed, weight, out=out) if bias is None else torch.addmm(bias, normed, weight, out=out)
