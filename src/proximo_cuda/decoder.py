"""A decoding pass of ten kernels a layer in bf16, where the modules of a model launch thirty-one.

It computes what the fused layers compute, in the same types: sums of the residual stream are part of the norm that
follows, the matrices of queries, keys and values are one, and so are those of a gate and its ups. Their adapters are
one too: eight more kernels. Norms of heads and chunks of long rows add to the ten, and so do products not cast.

Legend: B rows, D width, H query heads, H_kv key heads, K head width, F width between the products of the second half.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from proximo.models.attention.cache import RowCache
from proximo.models.attention.cache_layouts import FusedRowLayout
from proximo.models.attention.packed import AttentionLayout
from proximo.models.fast_path import Decoder, PackedLayers
from proximo.models.precision.compute import joined_cast
from proximo_cpu.fused_layers import FusedLayers
from proximo_cpu.model_reader import LayerParts
from proximo_cpu.operators import Linear, Norm, RMSNorm
from proximo_cpu.row_kernels import row_kernels_for
from proximo_cuda.needs import has_triton

if TYPE_CHECKING:  # Triton takes a second to import, and the planner needs none
    from proximo_cuda.row_kernels import RowKernels


def fused_layers(model: PreTrainedModel, *, half: bool) -> FusedLayers | None:
    """The fused layers of a model; None for one that runs as modules, as all do where the kernels are not right.

    The planner asks for those of a model without numbers, on a CPU.
    """
    if model.device.type == "cuda":
        if not (torch.cuda.is_available() and has_triton()):
            return None
        from proximo_cuda.row_kernels import agree

        if not agree(model.device):
            return None
    return FusedLayers.of(model, half=half, narrow_heads=True)


def decoder_of(fused: PackedLayers, otherwise: Decoder) -> Decoder:
    """`decode` of a decoder for these layers. `otherwise` decodes what is not one token in each row of a cache."""
    assert isinstance(fused, FusedLayers), "the layers of `fused_layers`"
    return FewKernels(fused, otherwise).decode


class FewKernels:
    """Decodes for one model. In bf16 it holds casts of weights: make a new one where a weight changed."""

    def __init__(self, fused: FusedLayers, otherwise: Decoder) -> None:
        self._parts = fused.parts
        self._otherwise = otherwise
        self._layers: list[_Layer] | None = None
        """Made with the first pass, inside its `casting`."""

    @torch.no_grad()
    def decode(
        self,
        token_ids: Int64[Tensor, "tokens"],
        position_ids: Int64[Tensor, "tokens"],
        cache: Cache,
        layout: AttentionLayout,
    ) -> Float[Tensor, "tokens hidden"]:
        """token_ids and position_ids [B] -> hidden states [B, D] after the final norm.

        Writes the keys and values of the new tokens to the cache.
        """
        parts = self._parts
        if not (isinstance(cache, RowCache) and isinstance(layout, FusedRowLayout)):
            return self._otherwise(token_ids, position_ids, cache, layout)
        stream = parts.embed(token_ids, position_ids)
        kernels: RowKernels | None = row_kernels_for(stream)
        if kernels is None:
            return self._otherwise(token_ids, position_ids, cache, layout)
        angles = parts.angles(stream, position_ids)
        self._layers = layers = self._layers or [_Layer.of(layer) for layer in parts.layers]
        added: Tensor | None = None
        for layer in layers:
            inputs, rest, sizes = layer.parts.inputs, layer.parts.rest, layer.projections.sizes
            stream, rows = _added_and_normed(kernels, stream, added, inputs.norm, inputs.dtype)
            joined = layer.projections.run(rows)
            _turn(kernels, layer.parts, joined, sizes, angles[layer.parts.angles])
            query, key, value = (piece.unflatten(1, (-1, 1, inputs.head_width)) for piece in joined.split(sizes, dim=1))
            keys, values = cache.update(key, value, layer.parts.attention.layer_idx)
            attended = layout.attend(query, keys, values, layer.parts.options).flatten(1)
            added = _normed(layer.output.run(attended), rest.after_attention)
            stream, rows = _added_and_normed(kernels, stream, added, rest.before_mlp, rest.dtype)
            product = rest.activation.run(layer.opened.run(rows).split(layer.opened.sizes, dim=1))
            added = _normed(layer.closed.run(product), rest.after_mlp)
        layout.num_calls += len(layers)
        _, hidden = _added_and_normed(kernels, stream, added, parts.last_norm, stream.dtype)
        return hidden if parts.finish is None else parts.finish(hidden)


@dataclass(frozen=True, slots=True)
class _Joint:
    """One or several linear layers of the same inputs."""

    layers: tuple[Linear, ...]
    """Without the adapters that multiply by themselves."""
    sizes: list[int]
    matrix: Tensor | None
    """Of all of them, [sum of sizes, I]; None where they multiply one by one."""
    bias: Tensor | None
    adapter: tuple[Tensor, Tensor, float] | None
    """Of all of them: A [sum of r, I], B in blocks [sum of sizes, sum of r], and the scaling."""

    @classmethod
    def of(cls, layers: tuple[Linear, ...], dtype: torch.dtype) -> "_Joint":
        """One matrix where the layers' own are made for products anyway: cast to bf16, or added up with an adapter."""
        sizes = [layer.num_outputs for layer in layers]
        biases = [layer.own_rows(layer.bias) for layer in layers if layer.bias is not None]
        added_up = any(layer.adapter is not None and layer.adapter.up.dtype is dtype for layer in layers)
        plain = all(layer.rows is None and not layer.transposed for layer in layers) and len(layers) > 1
        cast = plain and dtype is torch.bfloat16 and all(layer.weight.dtype is torch.float32 for layer in layers)
        adapter = _joint_adapter(layers, dtype)
        if len(biases) not in (0, len(layers)) or not (added_up or cast):
            kept = (each if each.apart(dtype) is None else replace(each, adapter=None) for each in layers)
            return cls(tuple(kept), sizes, None, None, adapter)
        added = torch.cat([layer.matrix(dtype) for layer in layers]) if added_up else None
        matrix = joined_cast([layer.weight for layer in layers], dtype) if added is None else added
        return cls(layers, sizes, matrix, torch.cat(biases).to(dtype) if biases else None, adapter)

    def run(self, rows: Tensor) -> Tensor:
        """rows [B, I] -> [B, sum of sizes]."""
        if self.matrix is not None:
            turned = self.matrix.t()
            joined = torch.mm(rows, turned) if self.bias is None else torch.addmm(self.bias, rows, turned)
        else:
            joined = rows.new_empty(len(rows), sum(self.sizes))
            for layer, piece in zip(self.layers, joined.split(self.sizes, dim=1), strict=True):
                layer.run(rows, out=piece)
        if self.adapter is not None:
            down, up, scaling = self.adapter
            joined.addmm_(torch.mm(rows, down.t()), up.t(), alpha=scaling)
        return joined


def _joint_adapter(layers: Sequence[Linear], dtype: torch.dtype) -> tuple[Tensor, Tensor, float] | None:
    """See `_Joint.adapter`: two products for all layers, in place of two for each."""
    each = [(layer, layer.apart(dtype)) for layer in layers]
    known = [adapter for _, adapter in each if adapter is not None]
    if not known:
        return None
    scaling = known[0][2] or 1.0  # divided by below
    blocks = [
        layer.weight.new_empty(layer.num_outputs, 0, dtype=dtype) if found is None else found[1] * (found[2] / scaling)
        for layer, found in each
    ]
    return torch.cat([down for down, _, _ in known]), torch.block_diag(*blocks), scaling


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer, with its products."""

    parts: LayerParts
    projections: _Joint
    output: _Joint
    opened: _Joint
    closed: _Joint

    @classmethod
    def of(cls, parts: LayerParts) -> "_Layer":
        inputs, rest = parts.inputs, parts.rest
        each = inputs.projections, (rest.output,), rest.opened, (rest.closed,)
        return cls(parts, *(_Joint.of(layers, inputs.dtype) for layers in each))


def _added_and_normed(
    kernels: "RowKernels", stream: Tensor, added: Tensor | None, norm: Norm | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """stream + added [B, D], and its norm in `dtype`."""
    if isinstance(norm, RMSNorm):
        normed, _, stream = kernels.add_norm(stream, added, norm.factor(), norm.epsilon, dtype)
        return stream, normed
    stream = stream if added is None else torch.add(stream, added)
    return stream, (stream if norm is None else norm.run(stream)[0]).to(dtype)


def _normed(rows: Tensor, norm: Norm | None) -> Tensor:
    """rows [B, D] as they are, or their norm in float32."""
    return rows if norm is None else norm.run(rows.float())[0]


def _turn(
    kernels: "RowKernels",
    layer: LayerParts,
    joined: Tensor,
    sizes: Sequence[int],
    angles: tuple[Tensor | None, Tensor | None],
) -> None:
    """Norm the heads of queries and keys and turn them by their positions, in `joined` [B, H K + 2 H_kv K]."""
    inputs, (cosines, sines) = layer.inputs, angles
    for norm, piece in zip(inputs.head_norms or (), joined.split(sizes, dim=1), strict=False):
        piece.copy_(norm.run(piece.reshape(-1, len(norm.weight)))[0].view(piece.shape))
    if cosines is not None and sines is not None:
        heads = joined[:, : sizes[0] + sizes[1]].unflatten(1, (-1, inputs.head_width))[..., : 2 * cosines.shape[-1]]
        kernels.rotate(heads, cosines, sines, heads, back=False)
