"""Attention of all sequences of a packed row in one call of torch's variable-length CUDA kernel.

Legend: T packed tokens, C with copies of prefixes, S segments, H query heads, H_kv key heads, K head width.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from proximo.models.attention.packed import AttentionOptions, PackedLayout, PrefixCopies
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
    """A `PackedKernel` for CUDA in half precision. It gives the kernel a copy of its prefix for every segment."""

    def __init__(self, lengths: tuple[int, ...], prefixes: tuple[int | None, ...] = ()) -> None:
        self._lengths = lengths
        # Asked here, since a recomputed layer must find the same answer.
        self._is_right = not prefixes or not torch.cuda.is_available() or ends_together(torch.device("cuda"))
        self._copies = PrefixCopies(lengths, prefixes)
        self._bounds: list[Tensor] = []
        """[S + 1] int32 cumulative lengths of queries and of keys, copied to the device once for all layers."""

    def fits(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> bool:
        """True for half precision on CUDA, K a multiple of 8 up to 256, and no dropout, soft-cap or sinks.

        With prefixes also the kernel must be one that lets the last query see the last key.
        """
        if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or varlen_kernel() is None:
            return False
        head_width = query.shape[-1]
        one_width = head_width == key.shape[-1] == value.shape[-1]
        if not (options.is_plain and one_width and head_width <= 256 and head_width % 8 == 0):
            return False
        return self._is_right

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """query [1, H, T, K], key and value [1, H_kv, T, K] -> [1, T, H, K]."""
        if not self._bounds:
            each = self._lengths, self._copies.lengths
            self._bounds = [cumulative_lengths(lengths, query.device) for lengths in each]
        return _attend(
            query[0].transpose(0, 1),
            *(self._copies.added(each[0].transpose(0, 1), dim=0) for each in (key, value)),
            bounds=self._bounds,
            longest=(max(self._lengths), max(self._copies.lengths)),
            options=options,
        ).unsqueeze(0)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bounds: Sequence[Tensor],
    longest: tuple[int, int],
    options: AttentionOptions,
) -> Tensor:
    """query [T, H, K], key and value [C, H_kv, K] -> [T, H, K]. `bounds` and `longest`: of queries, then of keys."""
    kernel = varlen_kernel()
    assert kernel is not None, "fits() comes first"
    left = -1 if options.sliding_window is None else options.sliding_window - 1
    return kernel(
        query,
        key,
        value,
        *bounds,
        *longest,
        scale=options.scaling,
        window_size=(left, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )


@cache
def ends_together(device: torch.device) -> bool:
    """Whether the kernel aligns the last query with the last key where a sequence has fewer queries than keys.

    FlashAttention does so since version 2.1, and aligned the first ones before. It is tried out, once per process.
    """
    if varlen_kernel() is None:
        return False
    lengths, prefixes = (5, 3, 4), (None, 0, 0)
    copies = PrefixCopies(lengths, prefixes)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(sum(lengths), 2, 16, generator=generator).to(device, torch.bfloat16) for _ in range(3)]
    bounds = [cumulative_lengths(each, device) for each in (lengths, copies.lengths)]
    longest = max(lengths), max(copies.lengths)
    for window in (None, 3):
        options = AttentionOptions(sliding_window=window)
        copied = given[0], *(copies.added(each, dim=0) for each in given[1:])
        with torch.no_grad():
            found = _attend(*copied, bounds=bounds, longest=longest, options=options)
            heads = [each.float().transpose(0, 1)[None] for each in given]
            expected = PackedLayout(lengths, prefixes=prefixes).attend(heads[0], heads[1], heads[2], options)[0]
        if not (found.float() - expected).abs().max() <= 0.05:
            return False
    return True
