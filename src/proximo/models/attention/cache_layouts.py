"""The layouts of passes over a key-value cache: where new tokens are written, and which keys they attend to.

Legend: B active rows, H query heads, H_kv key/value heads, K head width, M longest row, T packed tokens.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from proximo.kernels import DecodingKernels
from proximo.models.attention.packed import AttentionOptions, SegmentAttention, explicit_attention


class TokenLayout(ABC):
    """The layout of a pass that appends tokens to rows of the cache."""

    def __init__(self, positions: Tensor, rows: Tensor, *, num_tokens: int) -> None:
        """`positions` and `rows` [T]: of each new token. `num_tokens`: M, the longest row with its new tokens."""
        self.positions = positions
        self.rows = rows
        self.num_tokens = num_tokens
        self.num_calls = 0
        self._flat: dict[int, Tensor] = {}

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See `AttentionLayout`. Ignores dropout."""

    @abstractmethod
    def read(self, storage: Tensor) -> Tensor:
        """The part of keys or values [rows, H_kv, capacity, K] that `attend` reads."""

    def write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        """Write the new tokens' keys and values, as a layer gives them, into storage [rows, H_kv, capacity, K]."""
        # One index_copy_ on a flat view of all rows and heads writes each token at its own position.
        places = self.flat_positions(keys.shape[1], keys.shape[2])
        keys.view(-1, keys.shape[-1]).index_copy_(0, places, key.reshape(-1, keys.shape[-1]))
        values.view(-1, values.shape[-1]).index_copy_(0, places, value.reshape(-1, values.shape[-1]))

    def flat_positions(self, num_heads: int, capacity: int) -> Tensor:
        """[T * H_kv] indices of the new tokens in storage viewed as [rows * H_kv * capacity, K]."""
        if num_heads not in self._flat:
            heads = torch.arange(num_heads, device=self.positions.device)
            places = (self.rows[:, None] * num_heads + heads) * capacity + self.positions[:, None]
            self._flat[num_heads] = self._as_states(places).reshape(-1)
        return self._flat[num_heads]

    @abstractmethod
    def _as_states(self, places: Tensor) -> Tensor:
        """[T, H_kv], in the order in which a layer gives the heads of tokens."""


class ExtensionLayout(TokenLayout):
    """Attention of several new tokens in each of some rows over that row, themselves included. A packed pass."""

    def __init__(self, positions: Tensor, rows: Tensor, *, segments: Sequence[tuple[int, int, int]]) -> None:
        """`segments`: a row, its tokens before, its new tokens, in the order of the packed tokens."""
        super().__init__(positions, rows, num_tokens=max(before + count for _, before, count in segments))
        self._bounds = segments
        self._segments = SegmentAttention()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """query [1, H, T, K], key and value [rows, H_kv, M, K] -> [1, T, H, K]."""
        parts = []
        queries = query.split([count for *_, count in self._bounds], dim=2)
        for part, (row, before, count) in zip(queries, self._bounds, strict=True):
            keys, values = (each[row : row + 1, :, : before + count] for each in (key, value))
            parts.append(self._segments.attend(part, keys, values, options).transpose(1, 2))
        return torch.cat(parts, dim=1)

    def read(self, storage: Tensor) -> Tensor:
        """A view of the rows up to the last one that it extends."""
        return storage[: max(row for row, *_ in self._bounds) + 1, :, : self.num_tokens]

    def _as_states(self, places: Tensor) -> Tensor:
        return places.T


class RowLayout(TokenLayout):
    """Attention of one new token in each active row over that row's own keys and values. Rows differ in length."""

    def __init__(self, positions: Tensor, rows: Tensor, *, num_tokens: int, are_first: bool) -> None:
        """`are_first`: the rows are 0, 1, 2, ..."""
        super().__init__(positions, rows, num_tokens=num_tokens)
        self._are_first = are_first
        # Masks, computed once per pass and shared by its layers.
        self._seen: dict[int | None, Tensor] = {}
        self._bias: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def read(self, storage: Tensor) -> Tensor:
        """A view of the first rows, or a copy of others."""
        seen = storage[:, :, : self.num_tokens]
        return seen[: len(self.rows)] if self._are_first else seen.index_select(0, self.rows)

    def _as_states(self, places: Tensor) -> Tensor:
        return places

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """query [B, H, 1, K], key and value [B, H_kv, M, K] -> [B, 1, H, K]. Ignores dropout."""
        num_rows, num_heads, _, _ = query.shape
        if options.sinks is not None:
            seen = self._seen_by(options.sliding_window)
            return explicit_attention(query, key, value, seen, options).transpose(1, 2)
        # Grouped query attention: the query heads of one key head become several queries of it. So keys need not be
        # repeated, and the scores are products of matrices.
        grouped = query.reshape(num_rows, key.shape[1], num_heads // key.shape[1], query.shape[3])
        if options.softcap is not None:
            output = explicit_attention(grouped, key, value, self._seen_by(options.sliding_window), options)
        else:
            bias = self._bias_of(options.sliding_window, query.dtype)
            output = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=bias, scale=options.scaling)
        return output.reshape(num_rows, 1, num_heads, value.shape[3])

    def _seen_by(self, window: int | None) -> Tensor:
        """[B, 1, 1, M] bool: True at the tokens that each row's new token may attend to."""
        if window not in self._seen:
            distance = self.positions[:, None] - torch.arange(self.num_tokens, device=self.positions.device)
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            self._seen[window] = seen[:, None, None, :]
        return self._seen[window]

    def _bias_of(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[B, 1, 1, M]: 0 or -inf, to be added to the scores. A boolean mask would be converted in every layer."""
        if (window, dtype) not in self._bias:
            seen = self._seen_by(window)
            self._bias[window, dtype] = torch.zeros_like(seen, dtype=dtype).masked_fill_(seen.logical_not(), -math.inf)
        return self._bias[window, dtype]


class FusedRowLayout(RowLayout):
    """The same by the kernels of a plug-in, which read each row up to its own end, wherever it lies."""

    def __init__(self, positions: Tensor, rows: Tensor, *, kernels: DecodingKernels, capacity: int) -> None:
        super().__init__(positions, rows, num_tokens=capacity, are_first=False)
        self._kernels = kernels
        self._sources: Tensor | None = None

    def read(self, storage: Tensor) -> Tensor:
        """The whole storage: the kernels find the rows in it."""
        return storage

    def write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        """Write the new tokens' keys and values into storage [rows, H_kv, capacity, K], by the kernel."""
        if self._sources is None:
            self._sources = torch.arange(len(self.rows), device=keys.device)
        given = {"sources": self._sources, "rows": self.rows, "positions": self.positions}
        self._kernels.put(keys, values, key.transpose(0, 2), value.transpose(0, 2), **given)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """query [B, H, 1, K], key and value [rows, H_kv, capacity, K] -> [B, 1, H, K]. Ignores dropout."""
        if self._kernels.agree(query, key, value, options):
            return self._kernels.attend(query, key, value, rows=self.rows, positions=self.positions, options=options)
        return super().attend(query, key.index_select(0, self.rows), value.index_select(0, self.rows), options)
