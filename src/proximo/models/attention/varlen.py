"""Attention of all sequences of a packed row in one call of torch's variable-length CUDA kernel.

Legend: T packed tokens, C with copies of prefixes, S segments, H query heads, H_kv key heads, K head width.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from proximo.models.attention.packed import AttentionOptions, PackedLayout, PrefixCopies
from proximo.models.packing import cumulative_lengths


@cache
def varlen_kernel() -> Callable[..., Any]:
    """torch's varlen attention. Imported when it is needed, because its operators are registered by the import."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


@cache
def names_grouped_heads(kernel: Callable[..., Tensor]) -> bool:
    """Whether the kernel wants to be told of grouped heads. That of torch 2.11 takes them without a word."""
    return "enable_gqa" in inspect.signature(kernel).parameters


class VarlenAttention:
    """A `PackedKernel` for CUDA in half precision. It gives the kernel a copy of its prefix for every segment."""

    def __init__(self, lengths: tuple[int, ...], prefixes: tuple[int | None, ...] = ()) -> None:
        self._lengths = lengths
        self._has_prefixes = bool(prefixes)
        self._copies = PrefixCopies(lengths, prefixes)
        self._bounds: list[Tensor] = []
        """[S + 1] int32 cumulative lengths of queries and of keys, copied to the device once for all layers."""

    def fits(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> bool:
        """True for half precision on CUDA, K a multiple of 8 up to 256, and no dropout, soft-cap or sinks.

        With prefixes, and with grouped heads that the kernel is not told of, it must also be right when tried out.
        """
        if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
            return False
        head_width = query.shape[-1]
        one_width = head_width == key.shape[-1] == value.shape[-1]
        if not (options.is_plain and one_width and head_width <= 256 and head_width % 8 == 0):
            return False
        untold = key.shape[1] != query.shape[1] and not names_grouped_heads(varlen_kernel())
        tried = self._has_prefixes or untold
        return not tried or not torch.cuda.is_available() or is_right(torch.device("cuda"), grouped=untold)

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
    left = -1 if options.sliding_window is None else options.sliding_window - 1
    grouped = {"enable_gqa": key.shape[1] != query.shape[1]} if names_grouped_heads(kernel) else {}
    return kernel(
        query,
        key,
        value,
        *bounds,
        *longest,
        scale=options.scaling,
        window_size=(left, 0),
        **grouped,
    )


@cache
def is_right(device: torch.device, *, grouped: bool) -> bool:
    """Whether the kernel agrees with attention per segment, where segments follow prefixes. Tried once per process.

    FlashAttention aligns the last query with the last key since version 2.1, and aligned the first ones before.
    `grouped`: with two query heads for each key head.
    """
    lengths, prefixes = (5, 3, 4), (None, 0, 0)
    copies = PrefixCopies(lengths, prefixes)
    generator = torch.Generator().manual_seed(0)
    heads = (2, 1, 1) if grouped else (2, 2, 2)
    given = [torch.randn(12, count, 16, generator=generator).to(device, torch.bfloat16) for count in heads]
    bounds = [cumulative_lengths(each, device) for each in (lengths, copies.lengths)]
    longest = max(lengths), max(copies.lengths)
    for window in (None, 3):
        options = AttentionOptions(sliding_window=window)
        copied = given[0], *(copies.added(each, dim=0) for each in given[1:])
        with torch.no_grad():
            try:
                found = _attend(*copied, bounds=bounds, longest=longest, options=options)
            except (RuntimeError, ValueError):  # it refuses what it was given
                return False
            wide = [each.float().transpose(0, 1)[None] for each in given]
            expected = PackedLayout(lengths, prefixes=prefixes).attend(wide[0], wide[1], wide[2], options)[0]
        if not (found.float() - expected).abs().max() <= 0.05:
            return False
    return True
