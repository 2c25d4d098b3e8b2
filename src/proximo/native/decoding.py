"""Arguments of `decode.c` as ctypes structures, and its calls. models/cpu/decoding.py decides which models use it."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from proximo.native.library import declare, is_plain, kernels_for, library, pointer

FEW_ROWS = 64
"""Up to this many rows the kernel's product is faster than torch's."""


RMS_NORM, LAYER_NORM = 1, 2
"""Kinds of norms in decode.c, where 0 is none."""


class NormPointers(Structure):
    """A norm; of kind 0 where there is none. The struct `Norm` of decode.c."""

    _fields_ = [
        ("kind", c_int64),
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_float) for name in ("epsilon", "offset")),
    ]


class MatrixPointers(Structure):
    """The matrix [outputs, inputs], bias and adapter of a linear layer. The struct `Matrix` of decode.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "bias", "down", "up")),
        ("rank", c_int64),
        ("scaling", c_float),
    ]


class LayerPointers(Structure):
    """Pointers to the weights of one layer, and its options. The struct `Layer` of decode.c."""

    _fields_ = [
        *((name, NormPointers) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")),
        *((name, NormPointers) for name in ("of_queries", "of_keys")),
        *((name, MatrixPointers) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        *((name, c_float) for name in ("scaling", "softcap")),
        *((name, c_int64) for name in ("window", "angles", "activation", "norms_each_head")),
    ]


class ModelPointers(Structure):
    """Sizes of a model, and its layers. The struct `Model` of decode.c."""

    _fields_ = [
        *(
            (name, c_int64)
            for name in ("num_layers", "width", "num_heads", "num_key_heads", "head_width", "inner_width")
        ),
        *((name, c_int64) for name in ("in_halves", "largest_rank")),
        ("last", NormPointers),
        ("layers", POINTER(LayerPointers)),
    ]


class _Angles(Structure):
    _fields_ = [("cosines", c_void_p), ("sines", c_void_p), ("half", c_int64)]


class _Pass(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "num_threads", "capacity")),
        ("positions", c_void_p),
        ("angles", POINTER(_Angles)),
        *((name, c_void_p) for name in ("keys", "values", "hidden", "scratch")),
    ]


@dataclass(frozen=True, slots=True)
class CachePointers:
    """Addresses of the keys and of the values of each layer, [rows, G, capacity, K] each."""

    keys: ctypes.Array
    values: ctypes.Array
    capacity: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[Tensor, Tensor]]) -> "CachePointers":
        """`pairs`: keys and values of each layer, in the order of the layers."""
        array = c_void_p * len(pairs)
        keys, values = (array(*map(pointer, each)) for each in zip(*pairs, strict=True))
        return cls(keys, values, pairs[0][0].shape[2])


def decode(
    kernels: ctypes.CDLL,
    model: ModelPointers,
    hidden: Tensor,
    positions: Tensor,
    *,
    angles: Sequence[tuple[Tensor, Tensor]],
    cache: CachePointers,
) -> None:
    """Run one token of each row through all layers.

    hidden [B, D] holds the embeddings, and afterwards the hidden states after the last norm. positions [B] int64;
    angles: pairs of cosines and sines, [B, half] contiguous each, in the order that layers name them by. Writes the new
    keys and values to the cache at these positions.
    """
    pairs = [_Angles(pointer(cosines), pointer(sines), cosines.shape[1]) for cosines, sines in angles]
    task = _Pass(
        num_rows=len(hidden),
        num_threads=torch.get_num_threads(),
        capacity=cache.capacity,
        positions=pointer(positions),
        angles=(_Angles * max(1, len(pairs)))(*pairs),
        keys=ctypes.addressof(cache.keys),
        values=ctypes.addressof(cache.values),
        hidden=pointer(hidden),
    )
    assert len(cache.keys) == model.num_layers, "cache and model have different numbers of layers"
    scratch = hidden.new_empty(_declared(kernels).scratch_size(model, task))
    task.scratch = pointer(scratch)
    kernels.decode(model, task)


def reads_few(rows: Tensor) -> bool:
    """Whether the kernel multiplies these rows: few contiguous ones of float32, in inference mode."""
    few = torch.is_inference_mode_enabled() and rows.dim() == 2 and len(rows) <= FEW_ROWS
    return few and rows.is_contiguous() and kernels_for(rows) is not None


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows [..., I], weight [O, I], bias [O] -> x W' + b [..., O]; by the kernel for rows that it reads.

    Those may be float32 beside a weight of bf16, and give float32.

    Under no_grad alone it is torch's product: the reference is computed under no_grad and the policy is not, and with
    two kinds of products their logits would differ in the last bits, so that the KL of equal models would not be 0.
    """
    kernels = library() if reads_few(rows) else None
    in_halves = weight.dtype is torch.bfloat16
    readable = is_plain(weight) and (in_halves or weight.dtype is torch.float32)
    readable = readable and all(each is None or each.is_contiguous() for each in (weight, bias))
    if kernels is None or not readable or not 0 < rows.shape[1] == weight.shape[1]:
        widens = in_halves and rows.dtype is torch.float32
        return functional.linear(rows, weight.float() if widens else weight, bias)
    result = rows.new_empty(len(rows), len(weight))
    tensors = map(pointer, (rows, weight, bias, result))
    _declared(kernels).linear_rows(*tensors, *rows.shape, len(weight), in_halves, torch.get_num_threads())
    return result


@cache
def _declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    model_and_pass = [POINTER(ModelPointers), POINTER(_Pass)]
    declare(
        kernels,
        {
            "scratch_size": (c_int64, *model_and_pass),
            "decode": (None, *model_and_pass),
            "linear_rows": (None, *[c_void_p] * 4, *[c_int64] * 5),
        },
    )
    return kernels
