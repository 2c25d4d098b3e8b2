"""Causal attention within the sequences of a packed row: the autograd function of the C kernel `csrc/attention.c`.

Queries, keys and values are read in place through their strides. For the backward pass, which recomputes the attention
weights, two softmax statistics per query and head are kept instead of the weights (as in FlashAttention,
arXiv:2205.14135).

Legend: T packed tokens, H query heads, G key heads, K head width, N pieces.
"""

import ctypes
import math
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from proximo.models.attention.packed import AttentionOptions
from proximo.models.packing import prefix_lengths
from proximo_cpu.library import declare, kernels_for, library, pointer

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Pieces:
    """Units of work for the kernel's threads, which name their segments by rows of `segments`.

    `families` are for the backward pass, since queries add to the gradients of the keys that they see: rows (first
    segment, end of the segments, 0), each a prefix with all that follow it, or a segment without prefix. `blocks` are
    for the forward pass, the queries of each segment cut into blocks: rows (segment, first query, end of the queries).
    The most expensive pieces come first, so that threads end at about the same time. One object serves all layers of a
    pass.
    """

    def __init__(self, lengths: Sequence[int], prefixes: Sequence[int | None] = ()) -> None:
        """Both as in `Packed`."""
        counts = np.array(lengths, dtype=np.int64)
        ends, before = counts.cumsum(), np.array(prefix_lengths(lengths, prefixes), dtype=np.int64)
        segments = np.arange(len(counts))
        families = np.array([i if p is None else p for i, p in enumerate(prefixes)]) if prefixes else segments
        order = np.argsort(families, kind="stable")  # each prefix comes first: it is earlier than those that follow it
        places = np.argsort(order)
        self.segments = _as_rows(ends - counts, ends, np.where(families == segments, -1, places[families]))[order]
        # Causal: the query at position p of its sequence reads p + 1 keys, so later queries cost more.
        cost = counts * (2 * before + counts)
        first = np.flatnonzero(self.segments[:, 2] < 0)
        family_ends = np.append(first[1:], len(counts))
        by_cost = np.argsort(-np.add.reduceat(cost[order], first), kind="stable")
        self.families = _as_rows(first, family_ends, np.zeros_like(first))[by_cost]
        block = ctypes.c_int64.in_dll(_kernels(), "attention_block").value
        blocks = -(-counts // block)
        segment, begin, end = (np.repeat(each, blocks) for each in (segments, ends - counts, ends))
        first = begin + block * (np.arange(len(begin)) - np.repeat(blocks.cumsum() - blocks, blocks))
        last = np.minimum(first + block, end)
        by_cost = np.argsort((first - last) * (2 * before[segment] + last + first - 2 * begin), kind="stable")
        self.blocks = _as_rows(places[segment], first, last)[by_cost]


def _as_rows(*columns: Numbers) -> Numbers:
    return np.ascontiguousarray(np.stack(columns, axis=1))


class _Work(ctypes.Structure):
    """The arguments of the kernels; the same fields as the structure in attention.c. Strides count floats."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_heads", "num_key_heads", "width", "window")),
        *((name, ctypes.c_int64) for name in ("num_pieces", "num_threads")),
        *((name, ctypes.c_void_p) for name in ("segments", "pieces", "query", "key", "value")),
        *((f"{name}_{dim}", ctypes.c_int64) for name in ("query", "key", "value") for dim in ("head", "token")),
        *((name, ctypes.c_void_p) for name in ("output", "normalisers", "scratch", "gradient")),
        *((name, ctypes.c_void_p) for name in ("of_query", "of_key", "of_value")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )


@cache
def _kernels() -> ctypes.CDLL:
    kernels = library()
    assert kernels is not None, "fits() comes first"
    work = ctypes.POINTER(_Work)
    declare(
        kernels,
        {
            "attention_scratch": (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
            "attention_forward": (None, work),
            "attention_backward": (None, work),
        },
    )
    return kernels


_scratch = threading.local()
"""Scratch memory of the kernel, one per calling thread. It is kept: new memory would cost page faults in every call."""


def _scratch_of(width: int, num_threads: int) -> int:
    size = _kernels().attention_scratch(width, num_threads)
    if getattr(_scratch, "size", 0) < size:
        _scratch.memory, _scratch.size = torch.empty(size, dtype=torch.float32, device="cpu"), size
    return _scratch.memory.data_ptr()


class KernelAttention:
    """A `PackedKernel` for float32 on a CPU."""

    def __init__(self, lengths: tuple[int, ...], prefixes: tuple[int | None, ...] = ()) -> None:
        self._lengths, self._prefixes = lengths, prefixes
        self._pieces: Pieces | None = None
        self._known: dict[tuple[type, torch.dtype, int, int], bool] = {}

    def fits(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> bool:
        """True for float32 on a CPU if the kernels could be built, and without dropout or sinks.

        False under autocast, where attention is computed in half precision, and while torch.compile traces.
        """
        if (
            options.sinks is not None
            or options.dropout
            or torch.compiler.is_compiling()
            or torch.is_autocast_enabled("cpu")
        ):
            return False
        key_of_call = type(query), query.dtype, query.shape[3], value.shape[3]
        # The answer is cached: it also depends on profilers and other modes of this thread, but a checkpointed layer
        # must be recomputed by the same code as in the forward pass.
        if key_of_call not in self._known:
            one_width = query.shape[3] == key.shape[3] == value.shape[3]
            self._known[key_of_call] = one_width and None not in map(kernels_for, (query, key, value))
        return self._known[key_of_call]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """query [1, H, T, K], key and value [1, G, T, K] -> [1, T, H, K]."""
        self._pieces = self._pieces or Pieces(self._lengths, self._prefixes)
        return _Attention.apply(query, key, value, self._pieces, options)


def _contiguous_heads(packed: Tensor) -> Tensor:
    """[1, H, T, K] with the K numbers of each head contiguous, as the kernel reads them."""
    return packed if packed.stride(3) == 1 else packed.contiguous()


class _Attention(torch.autograd.Function):
    """softmax(cap(scaling * q k') + mask) v within each sequence, and over the prefix that it shares."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pieces: Pieces,
        options: AttentionOptions,
    ) -> Tensor:
        """query [1, H, T, K], key and value [1, G, T, K] -> [1, T, H, K]."""
        query, key, value = map(_contiguous_heads, (query, key, value))
        _, num_heads, num_tokens, width = query.shape
        output = query.new_empty(1, num_tokens, num_heads, width)
        normalisers = query.new_empty(num_tokens, num_heads, 2)
        ctx.pieces, ctx.window, ctx.softcap = pieces, options.sliding_window or 0, options.softcap or 0.0
        ctx.scaling = 1 / math.sqrt(width) if options.scaling is None else options.scaling
        work = _work(ctx, query, key, value, output, normalisers, pieces.blocks)
        _kernels().attention_forward(work)
        ctx.save_for_backward(query, key, value, output, normalisers)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normalisers = ctx.saved_tensors
        gradient = gradient.contiguous()
        # [T, heads, K]: contiguous for the backward pass of the projections, which receives these gradients.
        gradients = [
            tensor.new_empty(tensor.shape[2], tensor.shape[1], tensor.shape[3]) for tensor in (query, key, value)
        ]
        work = _work(ctx, query, key, value, output, normalisers, ctx.pieces.families)
        work.gradient = pointer(gradient)
        work.of_query, work.of_key, work.of_value = map(pointer, gradients)
        _kernels().attention_backward(work)
        return *(tensor.transpose(0, 1)[None] for tensor in gradients), None, None


def _work(  # noqa: PLR0917
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, output: Tensor, normalisers: Tensor, pieces: Any
) -> _Work:
    """The arguments that forward and backward pass have in common."""
    num_threads = torch.get_num_threads()
    _, num_heads, _, width = query.shape
    work = _Work(num_heads, key.shape[1], width, ctx.window, len(pieces), num_threads)
    work.segments, work.pieces = ctx.pieces.segments.ctypes.data, pieces.ctypes.data
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        setattr(work, name, tensor.data_ptr())
        setattr(work, f"{name}_head", tensor.stride(1))
        setattr(work, f"{name}_token", tensor.stride(2))
    work.output, work.normalisers = pointer(output), pointer(normalisers)
    work.scratch = _scratch_of(width, num_threads)
    work.scaling, work.softcap = ctx.scaling, ctx.softcap
    return work
