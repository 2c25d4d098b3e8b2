"""The key-value cache of decoding: one row of storage for every response that is being decoded.

Prompts are prefilled in packed passes; `PromptCache` captures their keys and values. `RowCache` copies those
of a prompt into the row of each of its samples. Every decoding pass then writes one token per row in place, each row at
its own length. Active rows are always the first ones, so a pass reads a view and copies nothing. The scheduler
(rollout/scheduler.py) assigns the rows. The two passes, for a model whose attention goes through `packed.py`:

    with attending(PackedLayout(packed.lengths)):
        model(input_ids=packed.token_ids[None], position_ids=packed.position_ids[None],
              **{cache_argument(type(model)): PromptCache(packed.lengths)})
    layout = row_cache.advance(num_rows)
    with attending(layout):
        model(input_ids=tokens[:, None], position_ids=layout.positions[:, None],
              **{cache_argument(type(model)): row_cache})

Legend: B active rows, H query heads, H_kv key/value heads, K head width, M longest row, T packed tokens.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache

from proximo.models.attention.packed import AttentionOptions, explicit_attention
from proximo.models.packing import send
from proximo.models.precision.compute import to_compute_type

Result = TypeVar("Result")


def cache_argument(model_type: type[nn.Module]) -> str:
    """The name under which a model takes a cache. transformers 5.24 renames it, in its own models first."""
    return "cache" if "cache" in inspect.signature(model_type.forward).parameters else "past_key_values"


class PromptCache(Cache):
    """The keys and values of several prompts from one packed pass, as [1, H_kv, T, K] per layer."""

    def __init__(self, lengths: Sequence[int], prefixes: Sequence[int | None] = ()) -> None:
        """Both as in `Packed`: tokens of each segment, and the prefix that each follows."""
        super().__init__(layers=[])
        ranges = list(pairwise((0, *accumulate(lengths))))
        self.pieces = [
            [own] if prefix is None else [ranges[prefix], own]
            for segment, (own, prefix) in enumerate(zip(ranges, prefixes or [None] * len(ranges), strict=True))
            if segment not in prefixes
        ]
        """[prompts] first token and end, among T, of the prefix of each prompt, if it has one, and of the rest."""
        self.captured: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each layer. Stores its keys and values and returns them, so it attends as without a cache."""
        key, value = to_compute_type(key_states, value_states)
        self.captured[layer_idx] = key, value
        return key, value


class RowCache(Cache):
    """Keys and values, [rows, H_kv, capacity, K] each per layer. Allocated with the first prompt; capacity doubles.

    Storage beyond the length of a row is zero. Attention gives it weight 0, but 0 times a NaN would still be NaN.
    """

    def __init__(self, *, num_rows: int, initial_tokens: int, max_tokens: int) -> None:
        """Rows have room for `initial_tokens` at first and for up to `max_tokens` later."""
        super().__init__(layers=[])
        self.lengths = [0] * num_rows
        self._capacity = min(initial_tokens, max_tokens)
        self._max_tokens = max_tokens
        self._storage: dict[int, tuple[Tensor, Tensor]] = {}
        self._step: RowLayout | None = None
        self._made: dict[Callable[..., Any], Any] = {}

    def place(self, prompts: PromptCache, index: int, rows: Sequence[int]) -> None:
        """Copy the keys and values of prompt `index` into `rows`, which replaces their contents."""
        pieces = prompts.pieces[index]
        num_tokens = sum(end - start for start, end in pieces)
        self._ensure(num_tokens)
        for layer, captured in prompts.captured.items():
            if layer not in self._storage:
                self._made.clear()
                self._storage[layer] = self._allocate(captured[0]), self._allocate(captured[1])
            for storage, states in zip(self._storage[layer], captured, strict=True):
                prompt = torch.cat([states[0, :, start:end] for start, end in pieces], dim=1)
                for row in rows:  # one copy per row: indexing with a list of rows takes three times as long
                    storage[row, :, :num_tokens] = prompt
        for row in rows:
            self._set_length(row, num_tokens)

    def move(self, source: int, target: int) -> None:
        """Copy row `source` to row `target`, when the scheduler fills a free row with the last active one."""
        num_tokens = self.lengths[source]
        for pair in self._storage.values():
            for storage in pair:
                storage[target, :, :num_tokens] = storage[source, :, :num_tokens]
        self._set_length(target, num_tokens)

    def advance(self, num_rows: int) -> "RowLayout":
        """Make room for one more token in each of the first `num_rows` rows. The next pass writes it there."""
        return next(self.passes(num_rows, 1))

    def passes(self, num_rows: int, count: int) -> Iterator["RowLayout"]:
        """The layouts of `count` passes that add one token each to the first `num_rows` rows.

        Run each pass before asking for the next layout. All positions are sent to the device at once, so that the host
        need not wait for it between two passes. A row that is full overwrites its last token: its response has reached
        the limit, and the tokens that it decodes further are discarded.
        """
        lengths = self.lengths[:num_rows]
        self._ensure(max(lengths) + 1)  # fails if the longest row is full already; the next line stops at the limit
        self._ensure(min(max(lengths) + count, self._max_tokens))
        device = next(iter(self._storage.values()))[0].device
        passes = np.arange(count)[:, None]
        positions = np.minimum(np.array(lengths) + passes, self._max_tokens - 1)
        for host, on_device in zip(positions, send(torch.from_numpy(positions), device), strict=True):
            self.lengths[:num_rows] = (host + 1).tolist()
            self._step = RowLayout(on_device, num_tokens=max(self.lengths[:num_rows]))
            yield self._step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each layer with one token per active row, [B, H_kv, 1, K]; returns views [B, H_kv, M, K]."""
        assert self._step is not None, "advance() comes before the pass"
        step, (keys, values) = self._step, self._storage[layer_idx]
        num_rows = key_states.shape[0]
        # One index_copy_ on a flat view of all rows and heads writes each row's token at its own position.
        flat_positions = step.flat_positions(keys.shape[1], self._capacity)
        key, value = (states.to(keys.dtype) for states in (key_states, value_states))
        keys.view(-1, keys.shape[-1]).index_copy_(0, flat_positions, key.reshape(-1, keys.shape[-1]))
        values.view(-1, values.shape[-1]).index_copy_(0, flat_positions, value.reshape(-1, values.shape[-1]))
        # Prompts that fused layers computed are float32 also where the modules, which decode here, attend in bf16.
        key, value = to_compute_type(keys[:num_rows, :, : step.num_tokens], values[:num_rows, :, : step.num_tokens])
        return key, value

    def made_of_storage(self, make: Callable[[list[tuple[Tensor, Tensor]]], Result]) -> Result:
        """The result of `make` for the keys and values of each layer, in order; made again only if they move in memory.

        For a decoder that reads the storage and writes the next token itself.
        """
        if make not in self._made:
            self._made[make] = make([self._storage[layer] for layer in sorted(self._storage)])
        return self._made[make]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Tokens of the longest row before this pass. Rows differ, so callers always pass positions to the model."""
        return 0 if self._step is None else self._step.num_tokens - 1

    def _set_length(self, row: int, num_tokens: int) -> None:
        """Set the length of a row and zero its storage beyond that. Storage beyond its old length is zero already."""
        for pair in self._storage.values() if num_tokens < self.lengths[row] else ():
            for storage in pair:
                storage[row, :, num_tokens : self.lengths[row]] = 0
        self.lengths[row] = num_tokens

    def _allocate(self, like: Tensor) -> Tensor:
        return like.new_zeros(len(self.lengths), like.shape[1], self._capacity, like.shape[3])

    def _ensure(self, num_tokens: int) -> None:
        """Grow the storage of all layers until a row can hold `num_tokens`. Doubling keeps the number of copies
        small."""
        if num_tokens <= self._capacity:
            return
        assert num_tokens <= self._max_tokens, (
            f"a row needs {num_tokens} tokens, but it may have at most {self._max_tokens}"
        )
        self._made.clear()
        old, self._capacity = self._capacity, min(self._max_tokens, max(num_tokens, 2 * self._capacity))
        for layer, pair in self._storage.items():
            keys, values = (self._allocate(storage) for storage in pair)
            for new, storage in zip((keys, values), pair, strict=True):
                new[:, :, :old] = storage
            self._storage[layer] = keys, values


class RowLayout:
    """Attention of one new token in each active row over that row's own keys and values. Rows differ in length."""

    def __init__(self, positions: Tensor, *, num_tokens: int) -> None:
        """`positions` [B]: position of each row's new token. `num_tokens`: M, with the new tokens."""
        self.positions = positions
        self.num_tokens = num_tokens
        self.num_calls = 0
        # Masks and positions, computed once per pass and shared by its layers.
        self._seen: dict[int | None, Tensor] = {}
        self._bias: dict[tuple[int | None, torch.dtype], Tensor] = {}
        self._flat: dict[int, Tensor] = {}

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

    def flat_positions(self, num_heads: int, capacity: int) -> Tensor:
        """[B * H_kv] indices of the new tokens in storage viewed as [rows * H_kv * capacity, K]."""
        if num_heads not in self._flat:
            rows = torch.arange(self.positions.shape[0] * num_heads, device=self.positions.device) * capacity
            self._flat[num_heads] = rows + self.positions.repeat_interleave(num_heads)
        return self._flat[num_heads]

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
