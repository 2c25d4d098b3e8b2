"""Attention of all sequences of a packed row in one call of torch's variable-length CUDA kernel.

Legend: T packed tokens, S sequences, H query heads, H_kv key heads, K head width.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from proximo.models.attention.packed import AttentionOptions
from proximo.models.packing import cumulative_lengths


@cache
def varlen_kernel() -> Callable[..., Tensor] | None:
    """torch's varlen attention; None if this version has none that supports windows and grouped heads."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None
    kernel: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    known = inspect.signature(kernel).parameters
    return kernel if {"scale", "window_size", "enable_gqa"} <= known.keys() else None


class VarlenAttention:
    """A `PackedKernel` for CUDA in half precision."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self._lengths = lengths
        self._bounds: Tensor | None = None
        """[S + 1] int32 cumulative lengths, copied to the device once for all layers."""

    def fits(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> bool:
        """True for half precision on CUDA, K a multiple of 8 up to 256, and no dropout, soft-cap or sinks."""
        if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or varlen_kernel() is None:
            return False
        head_width = query.shape[-1]
        one_width = head_width == key.shape[-1] == value.shape[-1]
        return options.is_plain and one_width and head_width <= 256 and head_width % 8 == 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """query [1, H, T, K], key and value [1, H_kv, T, K] -> [1, T, H, K]."""
        kernel = varlen_kernel()
        assert kernel is not None, "fits() comes first"
        if self._bounds is None:
            self._bounds = cumulative_lengths(self._lengths, query.device)
        left = -1 if options.sliding_window is None else options.sliding_window - 1
        output = kernel(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            self._bounds,
            self._bounds,
            max(self._lengths),
            max(self._lengths),
            scale=options.scaling,
            window_size=(left, 0),
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return output.unsqueeze(0)
