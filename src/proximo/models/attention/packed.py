"""The attention function that transformers calls in every layer, and attention over packed sequences.

Linear layers see `[1, T]` packed tokens; only this function knows where sequences begin. It is registered at the
extension points of transformers, so no model code is rewritten. The caller sets a layout for the pass, which decides
the keys that each query attends to. The layout is a context variable, because the layers of some models drop keyword
arguments. The layout of cached decoding is in `cache.py`.

Legend: T packed tokens, C with copies of prefixes, S segments of the row, L tokens of one of them, P tokens of its
prefix, H query heads, K head width.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from proximo.errors import ModelError
from proximo.models.packing import prefix_lengths, send
from proximo.models.precision.compute import Compute, computing, current_compute, to_compute_type

ATTENTION = "proximo"
"""The name under which the function is registered: a model uses it after `set_attn_implementation(ATTENTION)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """Options that a layer passes to attention besides queries, keys and values."""

    scaling: float | None = None
    """Factor on the scores; None = 1 / sqrt(K)."""
    sliding_window: int | None = None
    """A token attends to itself and the `sliding_window - 1` tokens before it; None = all tokens before it."""
    softcap: float | None = None
    """c: scores become c * tanh(score / c), before the mask."""
    sinks: Tensor | None = None
    """[H]: an additional logit per head in the softmax; its weight multiplies no value."""
    dropout: float = 0.0
    """Probability of dropping an attention weight. Layers pass 0 in eval mode."""

    @property
    def is_plain(self) -> bool:
        """True without soft-cap, sinks and dropout: torch's fused kernels compute only this case."""
        return self.softcap is None and self.sinks is None and self.dropout == 0


class AttentionLayout(Protocol):
    """Computes the attention of a pass: decides which keys each query attends to."""

    num_calls: int
    """Calls of attention so far. The probe compares it with the number of layers."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """query [B, H, T, K], key and value [B, H_kv, T, K] from the layer or its cache -> [B, T, H, K]."""
        ...


_LAYOUT: ContextVar[AttentionLayout | None] = ContextVar("layout", default=None)


@contextmanager
def attending(layout: AttentionLayout | None) -> Generator[None]:
    """Inside, in this thread, layers attend by this layout."""
    before = _LAYOUT.set(layout)
    try:
        yield
    finally:
        _LAYOUT.reset(before)


def attending_again() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of the forward pass and of the recomputation, for activation checkpointing.

    The backward pass may run in another thread, where context variables have other values. So a recomputed layer gets
    the layout and the compute dtype of the forward pass.
    """
    return nullcontext(), _as_in(_LAYOUT.get(), current_compute())


@contextmanager
def _as_in(layout: AttentionLayout | None, compute: Compute | None) -> Generator[None]:
    with attending(layout), computing(compute):
        yield


def current_layout() -> AttentionLayout | None:
    """The layout by which layers attend now."""
    return _LAYOUT.get()


def register_attention() -> None:
    """Register `ATTENTION` with transformers. Repeated calls change nothing."""
    if ATTENTION not in AttentionInterface():
        AttentionInterface.register(ATTENTION, layout_attention)
    AttentionMaskInterface.register(ATTENTION, no_mask)


def layout_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Called by a transformers layer; calls the layout of the pass.

    Raises ModelError for anything that a layout cannot apply, as `check_arguments` does.
    """
    layout = _LAYOUT.get()
    if layout is None:
        raise ModelError(
            f"{type(module).__name__} was called without a layout: LanguageModel and ScalarModel set one for the "
            "models they own; before calling it or its generate() yourself, call model.set_attn_implementation('sdpa')"
        )
    check_arguments(module, attention_mask, arguments)
    options = AttentionOptions(
        scaling=arguments.get("scaling"),
        sliding_window=arguments.get("sliding_window"),
        softcap=arguments.get("softcap"),
        sinks=arguments.get("s_aux"),
        dropout=arguments.get("dropout", 0.0),
    )
    layout.num_calls += 1
    # Rotary embeddings are float32, and make float32 queries and keys: cast them to the dtype of the values.
    return layout.attend(*to_compute_type(query, key, value), options), None


def check_arguments(module: nn.Module, attention_mask: Tensor | None, arguments: Mapping[str, Any]) -> None:
    """Raises ModelError for a ready mask, a position bias, and attention in both directions."""
    where = type(module).__name__
    if attention_mask is not None or arguments.get("position_bias") is not None:
        raise ModelError(f"{where} makes its own attention mask or position bias, which packing cannot apply")
    if arguments.get("is_causal") is False:
        raise ModelError(f"{where} attends in both directions; only causal language models can be packed")


def no_mask(*, use_vmap: bool = False, **_: Any) -> None:
    """Replaces the mask of transformers by none, because the layout masks. Refuses a model's additional masks."""
    if use_vmap:
        raise ModelError("this model adds its own mask function to causal attention, which packing cannot apply")


class PackedKernel(Protocol):
    """A kernel that attends within all sequences of a packed row. One object serves all layers of a pass."""

    def __init__(self, lengths: tuple[int, ...], prefixes: tuple[int | None, ...] = ()) -> None:
        """Both as in `Packed`: tokens of each segment, and the prefix that each follows."""
        ...

    def fits(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> bool:
        """True if the kernel supports this call. The answer must be the same when a checkpointed layer is
        recomputed."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """query [1, H, T, K], key and value [1, H_kv, T, K] -> [1, T, H, K]."""
        ...


class PackedLayout:
    """Causal attention within each sequence of a packed row: a token attends to its prefix and to its own segment.

    Uses the kernel that `models/fast_path.py` chose, if it supports the call. Otherwise calls torch's attention once
    per segment.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        kernel: type[PackedKernel] | None = None,
        *,
        prefixes: Sequence[int | None] = (),
    ) -> None:
        """`lengths` and `prefixes` as in `Packed`."""
        self.lengths = tuple(lengths)
        self.num_calls = 0
        self._copies = PrefixCopies(self.lengths, prefixes)
        self._kernel = None if kernel is None else kernel(self.lengths, tuple(prefixes))
        self._segments = SegmentAttention()

    def attend(
        self,
        query: Float[Tensor, "1 heads tokens width"],
        key: Float[Tensor, "1 kv_heads keys width"],
        value: Float[Tensor, "1 kv_heads keys value_width"],
        options: AttentionOptions,
    ) -> Float[Tensor, "1 tokens heads value_width"]:
        """query [1, H, T, K], key and value [1, H_kv, T, K] -> [1, T, H, K]."""
        if query.shape[2] != sum(self.lengths) or key.shape[2] != query.shape[2]:
            raise ModelError(
                f"attention got {query.shape[2]} queries and {key.shape[2]} keys for {sum(self.lengths)} packed tokens"
            )
        if self._kernel is not None and self._kernel.fits(query, key, value, options):
            return self._kernel.attend(query, key, value, options)
        # split, not slices: the backward pass of each slice would fill a tensor of all T tokens (1.4 to 2.4 times the
        # time).
        queries = query.split(self.lengths, dim=2)
        keys, values = (self._copies.added(each, dim=2).split(self._copies.lengths, dim=2) for each in (key, value))
        each = zip(queries, keys, values, strict=True)
        parts = [self._segments.attend(q, k, v, options).transpose(1, 2) for q, k, v in each]
        return torch.cat(parts, dim=1)


class SegmentAttention:
    """Causal attention of the last tokens of one sequence. One object serves all layers of a pass."""

    def __init__(self) -> None:
        # One band mask per numbers of queries and keys and window serves all layers of the pass.
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """query [1, H, L, K], key and value [1, H_kv, P + L, K]: of the P tokens before too -> [1, H, L, K]."""
        counts = query.shape[2], key.shape[2]
        if options.softcap is not None or options.sinks is not None:
            mask = self._mask(*counts, options.sliding_window, query.device)
            return explicit_attention(query, key, value, mask, options)
        # Without a mask torch takes its fused causal kernel. A mask is needed only if the window cuts something off, or
        # if the keys begin before the queries.
        window = options.sliding_window
        masked = counts[0] != counts[1] or (window is not None and counts[1] > window)
        if query.is_cuda and query.dtype is torch.float32:
            # CUDA's only fused kernel for float32 knows no grouped heads: torch would take one that keeps all scores.
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self._mask(*counts, window, query.device) if masked else None,
            dropout_p=options.dropout,
            is_causal=not masked,
            scale=options.scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )

    def _mask(self, num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
        asked = num_queries, num_keys, window
        if asked not in self._masks:
            self._masks[asked] = band_mask(num_keys, window, device, num_queries=num_queries)
        return self._masks[asked]


def band_mask(
    num_keys: int, window: int | None, device: torch.device, *, num_queries: int | None = None
) -> Bool[Tensor, "queries keys"]:
    """[L, M] bool of the last L queries, all by default: True where the query at i may attend to key j: j <= i and
    j > i - window.
    """
    positions = torch.arange(num_keys, device=device)
    first = 0 if num_queries is None else num_keys - num_queries
    distance = positions[first:, None] - positions[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def explicit_attention(
    query: Float[Tensor, "batch heads queries width"],
    key: Float[Tensor, "batch kv_heads keys width"],
    value: Float[Tensor, "batch kv_heads keys value_width"],
    mask: Bool[Tensor, "#batch #heads #queries keys"] | Bool[Tensor, "#queries keys"],
    options: AttentionOptions,
) -> Float[Tensor, "batch heads queries value_width"]:
    """Attention with a soft-cap or sinks, which no fused kernel of torch supports. Softmax is in at least float32.

    query [B, H, L, K], key and value [B, H_kv, M, K], mask bool broadcastable to [B, H, L, M] -> [B, H, L, K].
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scaling = 1 / math.sqrt(query.shape[-1]) if options.scaling is None else options.scaling
    scores = (query @ key.transpose(2, 3)) * scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~mask, -math.inf)
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    weights = functional.dropout(weights, p=options.dropout)
    return weights.to(value.dtype) @ value


class PrefixCopies:
    """Puts a copy of its prefix before every segment that follows one. One object serves all layers of a pass."""

    def __init__(self, lengths: Sequence[int], prefixes: Sequence[int | None]) -> None:
        """Both as in `Packed`."""
        before = prefix_lengths(lengths, prefixes)
        self.lengths = tuple(map(add, before, lengths))
        """[S] tokens of each segment with its prefix."""
        self.sums: dict[tuple[int, int], list[int]] = {}
        """First token and tokens of a prefix -> its start indices among C: first itself, then its copies in order."""
        if not prefixes:
            return
        starts, placed = [0, *accumulate(lengths)], [0, *accumulate(self.lengths)]
        sources, own = [], []
        for segment, prefix in enumerate(prefixes):
            if prefix is not None:
                where = starts[prefix], lengths[prefix]
                self.sums.setdefault(where, [placed[prefix]]).append(placed[segment])
                sources.append(np.arange(starts[prefix], starts[prefix + 1]))
            sources.append(np.arange(starts[segment], starts[segment + 1]))
            own.append(np.arange(placed[segment] + before[segment], placed[segment + 1]))
        self._indices = [torch.from_numpy(np.concatenate(each)) for each in (sources, own)]

    def added(self, row: Tensor, *, dim: int) -> Tensor:
        """[..., T, ...] -> [..., C, ...], along `dim`."""
        return _Copy.apply(row, self, dim) if self.sums else row

    def indices(self, device: torch.device) -> list[Tensor]:
        """[C] the source index of each token, and [T] the index of each original token among C."""
        self._indices = [send(each, device) for each in self._indices]
        return self._indices


class _Copy(torch.autograd.Function):
    """The gradients of a prefix are summed in a fixed order and in at least float32.

    Those of `index_select` would be summed in the dtype of the row, and on CUDA in an order that differs between runs.
    """

    @staticmethod
    def forward(ctx: Any, row: Tensor, copies: PrefixCopies, dim: int) -> Tensor:
        ctx.copies, ctx.dim = copies, dim
        return row.index_select(dim, copies.indices(row.device)[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_row = gradient.index_select(ctx.dim, ctx.copies.indices(gradient.device)[1])
        wide = torch.promote_types(gradient.dtype, torch.float32)
        for (first, count), begins in ctx.copies.sums.items():
            pieces = torch.stack([gradient.narrow(ctx.dim, begin, count) for begin in begins])
            of_row.narrow(ctx.dim, first, count).copy_(pieces.sum(dim=0, dtype=wide))
        return of_row, None, None
