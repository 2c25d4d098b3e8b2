"""What `decode.c` is given, as ctypes sees it. Not the formulas, nor which models run this way."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from proximo.native.library import declare, kernels_for, pointer

FEW_ROWS = 64
"""Up to here the kernel's product is faster than torch's."""


class Layer(Structure):
    """Pointers to the weights of one layer, and what its attention asks."""

    _fields_ = [
        *((name, c_void_p) for name in ("first_norm", "query", "query_bias", "key", "key_bias", "value", "value_bias")),
        *((name, c_void_p) for name in ("output", "second_norm", "gate", "up", "down")),
        *((name, c_float) for name in ("first_epsilon", "second_epsilon", "scaling")),
        ("window", c_int64),
    ]


class Model(Structure):
    """Sizes, and all layers."""

    _fields_ = [
        *(
            (name, c_int64)
            for name in ("num_layers", "width", "num_heads", "num_key_heads", "head_width", "gated_width")
        ),
        ("last_norm", c_void_p),
        ("last_epsilon", c_float),
        ("layers", POINTER(Layer)),
    ]


class _Pass(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "num_threads", "capacity")),
        *((name, c_void_p) for name in ("positions", "cosines", "sines", "keys", "values", "hidden", "scratch")),
    ]


@dataclass(frozen=True, slots=True)
class CachePointers:
    """Where the storage of keys and of values of each layer begins, [rows, G, capacity, K] each."""

    keys: ctypes.Array
    values: ctypes.Array
    capacity: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[Tensor, Tensor]]) -> "CachePointers":
        """`pairs`: keys and values of each layer, in the order of the layers."""
        kind = c_void_p * len(pairs)
        keys, values = (kind(*map(pointer, each)) for each in zip(*pairs, strict=True))
        return cls(keys, values, pairs[0][0].shape[2])


def decode(
    kernels: ctypes.CDLL,
    model: Model,
    hidden: Tensor,
    positions: Tensor,
    *,
    angles: Sequence[Tensor],
    cache: CachePointers,
) -> None:
    """hidden [B, D], embeddings in, hidden states after the last norm out; positions [B] int64; angles: cosines and
    sines [B, K / 2]. The cache gets the new keys and values at their positions."""
    cosines, sines = angles
    task = _Pass(
        num_rows=len(hidden),
        num_threads=torch.get_num_threads(),
        capacity=cache.capacity,
        positions=pointer(positions),
        cosines=pointer(cosines),
        sines=pointer(sines),
        keys=ctypes.addressof(cache.keys),
        values=ctypes.addressof(cache.values),
        hidden=pointer(hidden),
    )
    assert len(cache.keys) == model.num_layers, "the cache and the model have other layers"
    scratch = hidden.new_empty(_declared(kernels).scratch_size(model, task))
    task.scratch = pointer(scratch)
    kernels.decode(model, task)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows [..., I], weight [O, I], bias [O] -> x W' + b [..., O]; by the kernel for few rows in inference mode.

    Not wherever no gradient is taken: a policy and its equal reference then had other logits, and a KL that is not 0.
    """
    few = torch.is_inference_mode_enabled() and rows.dim() == 2 and len(rows) <= FEW_ROWS
    given = [each for each in (rows, weight, bias) if each is not None]
    kernels = kernels_for(weight) if few and all(each.is_contiguous() for each in given) else None
    if kernels is None or kernels_for(rows) is None or not 0 < rows.shape[1] == weight.shape[1]:
        return functional.linear(rows, weight, bias)
    found = rows.new_empty(len(rows), len(weight))
    tensors = map(pointer, (rows, weight, bias, found))
    _declared(kernels).linear_rows(*tensors, *rows.shape, len(weight), torch.get_num_threads())
    return found


@cache
def _declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    whole = [POINTER(Model), POINTER(_Pass)]
    declare(
        kernels,
        {
            "scratch_size": (c_int64, *whole),
            "decode": (None, *whole),
            "linear_rows": (None, *[c_void_p] * 4, *[c_int64] * 4),
        },
    )
    return kernels
