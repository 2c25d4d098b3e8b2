"""The call of `csrc/decode.c`, with its arguments as ctypes structures. decoder.py fills them for a model."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from proximo_cpu.library import declare, pointer

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
        *((name, c_int64) for name in ("in_bf16", "largest_rank")),
        ("last", NormPointers),
        ("layers", POINTER(LayerPointers)),
    ]


class _Angles(Structure):
    _fields_ = [("cosines", c_void_p), ("sines", c_void_p), ("half", c_int64)]


class _Pass(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "num_threads", "capacity")),
        *((name, c_void_p) for name in ("positions", "sequences")),
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
    sequences: Tensor,
    *,
    angles: Sequence[tuple[Tensor, Tensor]],
    cache: CachePointers,
) -> None:
    """Run B tokens through all layers. Several may be of one sequence, each behind those before it.

    hidden [B, D] holds the embeddings, and afterwards the hidden states after the last norm. positions and sequences
    [B] int64: where the cache has each token's keys and values, which are written there. angles: pairs of cosines and
    sines, [B, half] contiguous each, in the order that layers name them by.
    """
    pairs = [_Angles(pointer(cosines), pointer(sines), cosines.shape[1]) for cosines, sines in angles]
    task = _Pass(
        num_rows=len(hidden),
        num_threads=torch.get_num_threads(),
        capacity=cache.capacity,
        positions=pointer(positions),
        sequences=pointer(sequences),
        angles=(_Angles * max(1, len(pairs)))(*pairs),
        keys=ctypes.addressof(cache.keys),
        values=ctypes.addressof(cache.values),
        hidden=pointer(hidden),
    )
    assert len(cache.keys) == model.num_layers, "cache and model have different numbers of layers"
    scratch = hidden.new_empty(_declared(kernels).scratch_size(model, task))
    task.scratch = pointer(scratch)
    kernels.decode(model, task)


@cache
def _declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    model_and_pass = [POINTER(ModelPointers), POINTER(_Pass)]
    declare(kernels, {"scratch_size": (c_int64, *model_and_pass), "decode": (None, *model_and_pass)})
    return kernels
