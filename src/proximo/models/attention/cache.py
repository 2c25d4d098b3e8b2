"""The key-value cache of decoding: one row of storage for every response that is being decoded.

Prompts are prefilled in packed passes; `PromptCache` captures their keys and values. `RowCache` copies those
of a prompt into the row of each of its samples. Every decoding pass then writes one token per row in place, each row at
its own length. If the rows of a pass are the first ones, it reads a view and copies nothing. A pass may also append
several tokens to each of some rows (`extend`). The two passes of `generate`, for a model whose attention goes through
`packed.py`:

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache

from proximo.kernels import DecodingKernels, kernels_of
from proximo.models.attention.cache_layouts import ExtensionLayout, FusedRowLayout, RowLayout, TokenLayout
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
        self.max_tokens = max_tokens
        """Tokens that a row may have."""
        self._storage: dict[int, tuple[Tensor, Tensor]] = {}
        self._step: TokenLayout | None = None
        self._made: dict[Callable[..., Any], Any] = {}
        self.num_storages = 0
        """Times that keys and values were given new places in memory."""

    def place(self, prompts: PromptCache, index: int, rows: Sequence[int]) -> None:
        """Copy the keys and values of prompt `index` into `rows`, which replaces their contents."""
        self.place_all(prompts, {index: rows})

    def place_all(self, prompts: PromptCache, rows: Mapping[int, Sequence[int]]) -> None:
        """Copy the keys and values of each of some prompts into rows, which replaces their contents.

        `rows`: of each prompt, by its index.
        """
        counts = {index: sum(end - start for start, end in prompts.pieces[index]) for index in rows}
        self._ensure(max(counts.values()))
        for layer, captured in prompts.captured.items():
            if layer not in self._storage:
                self._forget_made()
                self._storage[layer] = self._allocate(captured[0]), self._allocate(captured[1])
        kernels = self._kernels
        if kernels is None:
            for index, targets in rows.items():
                self._copy_prompt(prompts, index, targets)
        else:
            self._put_prompts(kernels, prompts, [(index, row) for index, targets in rows.items() for row in targets])
        for index, targets in rows.items():
            for row in targets:
                self._set_length(row, counts[index])

    def _copy_prompt(self, prompts: PromptCache, index: int, rows: Sequence[int]) -> None:
        for layer, captured in prompts.captured.items():
            for storage, states in zip(self._storage[layer], captured, strict=True):
                prompt = torch.cat([states[0, :, start:end] for start, end in prompts.pieces[index]], dim=1)
                for row in rows:  # one copy per row: indexing with a list of rows takes three times as long
                    storage[row, :, : prompt.shape[1]] = prompt

    def _put_prompts(self, kernels: DecodingKernels, prompts: PromptCache, pairs: Sequence[tuple[int, int]]) -> None:
        """By one kernel for each layer. `pairs`: a prompt and its row."""
        tokens = [np.concatenate([np.arange(*piece) for piece in prompts.pieces[index]]) for index, _ in pairs]
        counts = [len(each) for each in tokens]
        places = [np.repeat([row for _, row in pairs], counts), np.concatenate([np.arange(count) for count in counts])]
        numbers = send(torch.from_numpy(np.stack([np.concatenate(tokens), *places])), self.device)
        for layer, (key, value) in prompts.captured.items():
            kernels.put(*self._storage[layer], key, value, sources=numbers[0], rows=numbers[1], positions=numbers[2])

    def move(self, source: int, target: int) -> None:
        """Copy row `source` to row `target`, when the scheduler fills a free row with the last active one."""
        self.copy(source, target, self.lengths[source])

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Replace row `target` by the first tokens of row `source`."""
        for pair in self._storage.values():
            for storage in pair:
                storage[target, :, :num_tokens] = storage[source, :, :num_tokens]
        self._set_length(target, num_tokens)

    def cut(self, row: int, num_tokens: int) -> None:
        """Keep the first tokens of a row."""
        self._set_length(row, min(num_tokens, self.lengths[row]))

    def add_rows(self, count: int) -> None:
        """Make room for more rows, behind the others."""
        self._grow(len(self.lengths) + count, self._capacity)

    @property
    def is_allocated(self) -> bool:
        """Whether something was placed, which shows how keys and values look."""
        return bool(self._storage)

    def advance(self, num_rows: int) -> "RowLayout":
        """Make room for one more token in each of the first `num_rows` rows. The next pass writes it there."""
        return next(self.passes(range(num_rows), 1))

    def passes(self, rows: Sequence[int], count: int) -> Iterator["RowLayout"]:
        """The layouts of `count` passes that add one token each to some rows.

        Run each pass before asking for the next layout. All positions are sent to the device at once, so that the host
        need not wait for it between two passes. A row that is full overwrites its last token: its response has reached
        the limit, and the tokens that it decodes further are discarded.
        """
        lengths = self.reserve(rows, count)
        passes = np.arange(count)[:, None]
        positions = np.minimum(np.array(lengths) + passes, self.max_tokens - 1)
        numbers = torch.from_numpy(np.concatenate([np.array(rows)[None], positions]))
        on_rows, *each = send(numbers, self.device)
        first = list(rows) == list(range(len(rows)))
        for host, on_device in zip(positions, each, strict=True):
            self._step = self._row_layout(on_device, on_rows, num_tokens=int(host.max()) + 1, are_first=first)
            yield self._step

    def reserve(self, rows: Sequence[int], count: int) -> list[int]:
        """Make room for `count` more tokens in some rows, as far as they may grow. Returns their lengths before."""
        lengths = [self.lengths[row] for row in rows]
        self._ensure(max(lengths) + 1)  # fails if the longest row is full already; the next line stops at the limit
        self._ensure(min(max(lengths) + count, self.max_tokens))
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = min(length + count, self.max_tokens)
        return lengths

    def one_pass(self, positions: Tensor, rows: Tensor) -> "RowLayout":
        """The layout of the next pass, which writes a token at `positions` [B] of `rows` [B], both on the device.

        The host does not know their numbers: without kernels the pass reads all that rows have room for.
        """
        self._step = self._row_layout(positions, rows, num_tokens=self._capacity, are_first=False)
        return self._step

    def _row_layout(self, positions: Tensor, rows: Tensor, *, num_tokens: int, are_first: bool) -> "RowLayout":
        kernels = self._kernels
        if kernels is None:
            return RowLayout(positions, rows, num_tokens=num_tokens, are_first=are_first)
        return FusedRowLayout(positions, rows, kernels=kernels, capacity=self._capacity)

    def extend(self, rows: Sequence[int], counts: Sequence[int]) -> "ExtensionLayout":
        """Make room for `counts[i]` more tokens, at least one, in row `rows[i]`. The next pass writes them there."""
        before = [self.lengths[row] for row in rows]
        self._ensure(max(map(sum, zip(before, counts, strict=True))))
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count
        positions = [length + i for length, count in zip(before, counts, strict=True) for i in range(count)]
        numbers = torch.from_numpy(np.array([positions, np.repeat(rows, counts)]))
        self._step = ExtensionLayout(*send(numbers, self.device), segments=list(zip(rows, before, counts, strict=True)))
        return self._step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each layer with the keys and values of the new tokens; returns those that the layout attends to.

        One token per row: [B, H_kv, 1, K] -> [B, H_kv, M, K]. An extension: [1, H_kv, T, K] -> [rows, H_kv, M, K].
        """
        assert self._step is not None, "advance() or extend() comes before the pass"
        step, (keys, values) = self._step, self._storage[layer_idx]
        step.write(keys, values, key_states.to(keys.dtype), value_states.to(values.dtype))
        # Prompts that fused layers computed are float32 also where the modules, which decode here, attend in bf16.
        key, value = to_compute_type(step.read(keys), step.read(values))
        return key, value

    def made_of_storage(self, make: Callable[[list[tuple[Tensor, Tensor]]], Result]) -> Result:
        """The result of `make` for the keys and values of each layer, in order; made again only if they move in memory.

        For a decoder that reads the storage and writes the next token itself.
        """
        if make not in self._made:
            self._made[make] = make([self._storage[layer] for layer in sorted(self._storage)])
        return self._made[make]

    def _forget_made(self) -> None:
        self._made.clear()
        self.num_storages += 1

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Tokens of the longest row before this pass. Rows differ, so callers always pass positions to the model."""
        return 0 if self._step is None else self._step.num_tokens - 1

    @property
    def device(self) -> torch.device:
        """Of what was placed."""
        return next(iter(self._storage.values()))[0].device

    @property
    def _kernels(self) -> DecodingKernels | None:
        keys, values = next(iter(self._storage.values()))
        return kernels_of(keys.device.type).decoding(keys, values)

    def _set_length(self, row: int, num_tokens: int) -> None:
        """Set the length of a row and zero its storage beyond that. Storage beyond its old length is zero already.

        The kernels read nothing beyond the length.
        """
        shrinks = self._storage and num_tokens < self.lengths[row] and self._kernels is None
        for pair in self._storage.values() if shrinks else ():
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
        assert num_tokens <= self.max_tokens, (
            f"a row needs {num_tokens} tokens, but it may have at most {self.max_tokens}"
        )
        self._grow(len(self.lengths), min(self.max_tokens, max(num_tokens, 2 * self._capacity)))

    def _grow(self, num_rows: int, capacity: int) -> None:
        self._forget_made()
        self.lengths += [0] * (num_rows - len(self.lengths))
        self._capacity = capacity
        for layer, pair in self._storage.items():
            keys, values = (self._allocate(storage) for storage in pair)
            for new, storage in zip((keys, values), pair, strict=True):
                new[: storage.shape[0], :, : storage.shape[2]] = storage
            self._storage[layer] = keys, values
