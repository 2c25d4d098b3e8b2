"""All sequences of a packed row in one attention kernel of CUDA. Not the choice between this and other ways.

Legend: T packed tokens, S sequences, H query heads, H_kv key heads, K head width.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # it asks here what fits
    from proximo.models.attention.packed import AttentionOptions


@cache
def varlen_kernel() -> Callable[..., Tensor] | None:
    """torch's varlen attention, where this version has one that knows windows and grouped heads."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None
    kernel: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    known = inspect.signature(kernel).parameters
    return kernel if {"scale", "window_size", "enable_gqa"} <= known.keys() else None


def varlen_fits(query: Tensor, value: Tensor, options: "AttentionOptions") -> bool:
    """True where the kernel computes what is asked: CUDA, half precision, no dropout, cap or sinks."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or varlen_kernel() is None:
        return False
    plain = options.softcap is None and options.sinks is None and options.dropout == 0
    head_width = query.shape[-1]
    return plain and head_width == value.shape[-1] and head_width <= 256 and head_width % 8 == 0


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, options: "AttentionOptions", *, bounds: Tensor, longest: int
) -> Tensor:
    """query [1, H, T, K], key and value [1, H_kv, T, K], bounds [S + 1] int32 on their device -> [1, T, H, K]."""
    kernel = varlen_kernel()
    assert kernel is not None, "varlen_fits has looked"
    left = -1 if options.sliding_window is None else options.sliding_window - 1
    output = kernel(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        bounds,
        bounds,
        longest,
        longest,
        scale=options.scaling,
        window_size=(left, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return output.unsqueeze(0)
