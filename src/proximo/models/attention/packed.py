"""The attention function that transformers calls in every layer, and attention over packed sequences.

Linear layers see `[1, T]` packed tokens; only this function knows where sequences begin. It is registered with
transformers' own extension points, so no model code is rewritten. The caller sets a layout
for the pass, and the layout decides who attends to whom. It is a context variable, since the layers of some models drop
keyword arguments. Cached decoding has its layout in `cache.py`.

Legend: T packed tokens, S sequences, L tokens of one sequence, H query heads, K head width.
"""

import math
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from proximo.errors import ModelError
from proximo.models.attention.native import NativeAttention, Pieces, native_fits
from proximo.models.attention.short import Blocks, ShortAttention, is_short
from proximo.models.attention.varlen import varlen_attention, varlen_fits
from proximo.models.packing import cumulative_lengths
from proximo.models.precision.compute import Compute, computing, current_compute, to_compute_type

ATTENTION = "proximo"
"""The name under which the function is registered: a model uses it after `set_attn_implementation(ATTENTION)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """What a layer asks of attention beyond queries, keys and values."""

    scaling: float | None = None
    """Factor on the scores; None = 1 / sqrt(K)."""
    sliding_window: int | None = None
    """A token sees itself and the `sliding_window - 1` tokens before it; None = all before it."""
    softcap: float | None = None
    """c: scores become c * tanh(score / c), before the mask."""
    sinks: Tensor | None = None
    """[H] one more logit per head in the softmax, which carries no value."""
    dropout: float = 0.0
    """Probability of dropping an attention weight; layers pass 0 in eval mode."""


class AttentionLayout(Protocol):
    """Who attends to whom in this pass."""

    num_calls: int
    """How often a layer has asked; the probe compares it with the number of layers."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """query [B, H, T, K], key and value [B, H_kv, T, K] as the layer (and its cache) made them -> [B, T, H, K]."""
        ...


_LAYOUT: ContextVar[AttentionLayout | None] = ContextVar("layout", default=None)


@contextmanager
def attending(layout: AttentionLayout | None) -> Generator[None]:
    """Layers that are called within, in this thread, attend as the layout says."""
    before = _LAYOUT.set(layout)
    try:
        yield
    finally:
        _LAYOUT.reset(before)


def attending_again() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For activation checkpointing: a layer that runs again in the backward pass, perhaps in a thread of its own, does
    so under the layout of now, and computes in the type of now."""
    return nullcontext(), _as_in(_LAYOUT.get(), current_compute())


@contextmanager
def _as_in(layout: AttentionLayout | None, compute: Compute | None) -> Generator[None]:
    with attending(layout), computing(compute):
        yield


def register_attention(*, compiled: bool = True) -> None:
    """Make `ATTENTION` known to transformers. Calling it again changes nothing, but that `compiled=False` keeps it out
    of what torch.compile compiles, from then on."""
    if not compiled:
        AttentionInterface.register(ATTENTION, torch.compiler.disable(layout_attention))
    elif ATTENTION not in AttentionInterface():
        AttentionInterface.register(ATTENTION, layout_attention)
    AttentionMaskInterface.register(ATTENTION, no_mask)


def layout_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Called by a transformers layer; hands over to the layout of the pass.

    Raises ModelError for what a layout cannot honour: a ready-made mask, a position bias, attention in both directions.
    """
    layout = _LAYOUT.get()
    where = type(module).__name__
    if layout is None:
        raise ModelError(
            f"{where} was called without a layout: LanguageModel and ScalarModel set one for the models they own; "
            "before calling it or its generate() yourself, say model.set_attn_implementation('sdpa')"
        )
    if attention_mask is not None or given.get("position_bias") is not None:
        raise ModelError(f"{where} makes an attention mask or position bias of its own, which packing cannot honour")
    if given.get("is_causal") is False:
        raise ModelError(f"{where} attends in both directions; only causal language models can be packed")
    options = AttentionOptions(
        scaling=given.get("scaling"),
        sliding_window=given.get("sliding_window"),
        softcap=given.get("softcap"),
        sinks=given.get("s_aux"),
        dropout=given.get("dropout", 0.0),
    )
    layout.num_calls += 1
    # Rotary positions are float32, and what they turn is too: here is where it meets the values.
    return layout.attend(*to_compute_type(query, key, value), options), None


def no_mask(*, use_vmap: bool = False, **_: Any) -> None:
    """The mask that transformers asks for: none, because the layout knows. Refuses masks of a model's own making."""
    if use_vmap:
        raise ModelError("this model adds a mask function of its own to causal attention, which packing cannot honour")


class PackedLayout:
    """Each sequence of a packed row attends causally to itself alone.

    On a CPU the kernel in C (`native.py`), where it is there and computes what is asked; on CUDA one varlen
    kernel, likewise. Else one fused call per sequence, or blocks for short ones on a CPU (`short.py`).
    """

    def __init__(self, lengths: Sequence[int], *, in_blocks: bool | None = None) -> None:
        """`in_blocks`: False for one call per sequence, True for blocks wherever they compute what is asked, None for
        the fastest way, which neither may be."""
        self.lengths = tuple(lengths)
        # Decided by the first layer of each head width: a layer that is computed again goes the same way.
        self._prefers_blocks: dict[int, bool] = {}
        self._in_blocks = in_blocks
        self.num_calls = 0
        # One band mask per length and window serves all layers of the pass.
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._blocks: dict[tuple[int, int | None, torch.dtype], tuple[Blocks, Tensor]] = {}
        self._pieces: Pieces | None = None
        self._bounds: Tensor | None = None
        self._is_native: dict[tuple[type, torch.dtype, int, int], bool] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """query [1, H, T, K], key and value [1, H_kv, T, K] -> [1, T, H, K]."""
        if query.shape[2] != sum(self.lengths) or key.shape[2] != query.shape[2]:
            raise ModelError(
                f"attention got {query.shape[2]} queries and {key.shape[2]} keys for {sum(self.lengths)} packed tokens"
            )
        if varlen_fits(query, value, options):
            self._bounds = cumulative_lengths(self.lengths, query.device) if self._bounds is None else self._bounds
            return varlen_attention(query, key, value, options, bounds=self._bounds, longest=max(self.lengths))
        if self._in_blocks is None and short_fits(query, options) and self._fits_natively(query, key, value):
            self._pieces = self._pieces or Pieces(self.lengths)
            return NativeAttention.apply(query, key, value, self._pieces, options.sliding_window, options.scaling)
        if self._is_short(query, options):
            return ShortAttention.apply(query, key, value, *self._as_blocks(query, options), options.scaling)
        return self._one_by_one(query, key, value, options)

    def _one_by_one(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        # split, not slices: the backward of each slice would fill a tensor of all T tokens (1.4 to 2.4 times as slow).
        pieces = [tensor.split(self.lengths, dim=2) for tensor in (query, key, value)]
        parts = [self._one_sequence(q, k, v, options).transpose(1, 2) for q, k, v in zip(*pieces, strict=True)]
        return torch.cat(parts, dim=1)

    def _fits_natively(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        kind = type(query), query.dtype, query.shape[3], value.shape[3]
        if kind not in self._is_native:  # as with blocks: what is computed again goes the same way
            self._is_native[kind] = native_fits(query, key, value)
        return self._is_native[kind]

    def _one_sequence(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """[1, H, L, K] each (fewer heads in key and value) -> [1, H, L, K]."""
        if options.softcap is not None or options.sinks is not None:
            mask = self._mask(query.shape[2], options.sliding_window, query.device)
            return explicit_attention(query, key, value, mask, options)
        banded = options.sliding_window is not None and query.shape[2] > options.sliding_window
        mask = self._mask(query.shape[2], options.sliding_window, query.device) if banded else None
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=options.dropout,
            is_causal=not banded,
            scale=options.scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )

    def _is_short(self, query: Tensor, options: AttentionOptions) -> bool:
        if not short_fits(query, options):
            return False
        if self._in_blocks is not None:
            return self._in_blocks
        width = query.shape[3]
        if width not in self._prefers_blocks:
            # A rehearsal does not know the threads of the run: it takes what holds more.
            num_threads = 2 if isinstance(query, FakeTensor) else torch.get_num_threads()
            self._prefers_blocks[width] = is_short(self.lengths, width, num_threads)
        return self._prefers_blocks[width]

    def _as_blocks(self, query: Tensor, options: AttentionOptions) -> tuple[Blocks, Tensor]:
        wanted = query.shape[1], options.sliding_window, query.dtype
        if wanted not in self._blocks:
            seen = band_mask(max(self.lengths), options.sliding_window, query.device)
            mask = query.new_zeros(seen.shape).masked_fill_(~seen, -math.inf)
            self._blocks[wanted] = Blocks.of(self.lengths, query.shape[1], query), mask
        return self._blocks[wanted]

    def _mask(self, length: int, window: int | None, device: torch.device) -> Tensor:
        if (length, window) not in self._masks:
            self._masks[length, window] = band_mask(length, window, device)
        return self._masks[length, window]


def short_fits(query: Tensor, options: AttentionOptions) -> bool:
    """True where blocks, and the kernel in C, compute what is asked: a CPU, full precision, no dropout, cap or sinks,
    nothing compiled."""
    if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.float64) or torch.compiler.is_compiling():
        return False
    if torch.is_autocast_enabled("cpu"):  # under which the fused kernel takes halves
        return False
    return options.softcap is None and options.sinks is None and options.dropout == 0


def band_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """[L, L] bool: True where query i may see key j: j <= i, and j > i - window."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def explicit_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Attention with a soft-cap or sinks, which no fused kernel on a CPU offers; softmax in at least float32.

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
