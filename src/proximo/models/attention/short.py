"""Causal attention over many short sequences of a packed row, on a CPU: batched products over blocks of like lengths.

torch's fused kernel is called for one sequence at a time, and a call takes tens of microseconds, which for 16 tokens is
ten times its arithmetic. Here sequences of like lengths are copied into one padded block, heads first, so that a block
takes three operators forward and five backward, and all of them four copies each way. The softmax is kept for the
backward pass: L numbers per query and head, which is why long sequences stay with the fused kernel, that keeps one.

Legend: T packed tokens, S sequences, L tokens of one sequence, H query heads, G key heads, K head width, N rows of all
blocks together (one row: one head of one token, real or padding).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

aten = torch.ops.aten

MAX_LENGTH_ONE_THREAD = 48
MAX_LENGTH_TIMES_WIDTH = 2000
"""On one thread blocks are faster up to here (measured for heads of 16 to 128): 31 tokens with heads of 64."""
MAX_LENGTH = 96
"""On several threads: the fused kernel has little to share out in one short sequence."""
MIN_SEQUENCES = 4
PADDING = 1.15
"""A block's longest sequence is at most so many times as long as its shortest, and `SLACK` tokens."""
SLACK = 3


def is_short(lengths: Sequence[int], head_width: int, num_threads: int) -> bool:
    """Whether blocks are the faster way: by the mean over tokens of the length of the sequence that each is in."""
    if len(lengths) < MIN_SEQUENCES:
        return False
    length = sum(each * each for each in lengths) / sum(lengths)
    if num_threads > 1:
        return length <= MAX_LENGTH
    return length <= min(MAX_LENGTH_ONE_THREAD, MAX_LENGTH_TIMES_WIDTH / head_width)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where each head of each token lies in the blocks. One serves all layers of a pass."""

    shapes: tuple[tuple[int, int], ...]
    """Of each block: sequences times H, and the length to which they are padded."""
    tokens: Tensor
    """[N] the packed token whose row this is; padding repeats the last token of its sequence."""
    heads: Tensor
    """[N] the query head."""
    places: Tensor
    """[T * H] the row of each head of each token."""
    real: Tensor | None
    """[N, 1] 1 where no padding is, else 0; None where none is anywhere."""
    num_tokens: int
    """T."""
    _indices: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    """Into the rows of tensors, by the way they lie in memory: all layers make theirs alike."""

    @classmethod
    def of(cls, lengths: Sequence[int], num_heads: int, like: Tensor) -> "Blocks":
        """For sequences packed in this order; `like` gives type and device of the numbers."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        padded: list[int] = []
        counts: dict[int, int] = {}
        for i in order:
            if not padded or padded[-1] > PADDING * lengths[i] + SLACK:
                padded.append(lengths[i])
            else:
                padded.append(padded[-1])
            counts[padded[-1]] = counts.get(padded[-1], 0) + num_heads
        # Of each sequence, in the order of the blocks: its length there, its own, where it begins in the pack. All in
        # numpy: its small operators take half of the time.
        whole, ordered, widths = np.array(lengths), np.array(order), np.array(padded)
        last, starts = whole[ordered] - 1, (whole.cumsum() - whole)[ordered]
        offsets = (widths.cumsum() - widths) * num_heads
        owner = np.repeat(np.arange(len(order)), widths * num_heads)
        inside = np.arange(len(owner)) - offsets[owner]
        heads, position = inside // widths[owner], inside % widths[owner]
        tokens = starts[owner] + np.minimum(position, last[owner])
        # The way back, by token: the sequence that it is in, and where it stands there.
        place = np.empty_like(ordered)
        place[ordered] = np.arange(len(order))
        of_token = np.repeat(place, whole)
        first = offsets[of_token] + np.arange(len(of_token)) - starts[of_token]
        places = first[:, None] + widths[of_token][:, None] * np.arange(num_heads)
        real = (position <= last[owner])[:, None] if sum(padded) > sum(lengths) else None
        shapes = tuple((count, length) for length, count in counts.items())
        # torch.tensor: a rehearsal takes no memory of numpy's.
        device = like.device
        tokens, heads, places = (torch.tensor(each, device=device) for each in (tokens, heads, places.ravel()))
        mask = None if real is None else torch.tensor(real, device=device).to(like)
        return cls(shapes, tokens, heads, places, mask, sum(lengths))

    def split(self, *rows: Tensor) -> Iterator[list[Tensor]]:
        """[N, K] each -> of each block, [sequences * H, L, K] of each."""
        sizes = [count * length for count, length in self.shapes]
        for (count, length), *parts in zip(self.shapes, *(each.split(sizes) for each in rows), strict=True):
            yield [part.view(count, length, -1) for part in parts]

    def gathered(self, packed: Tensor, num_heads: int) -> Tensor:
        """[1, G, T, K] -> [N, K]; of G heads, each serves `num_heads / G` query heads."""
        _, heads, num_tokens, width = packed.shape
        if any(stride % width for stride in packed.stride()[1:3]) or packed.stride(3) != 1:
            packed = packed.contiguous()
        # All rows of the memory in which they lie, also what lies between two of them: nothing is copied but once.
        per_head, per_token = (stride // width for stride in packed.stride()[1:3])
        rows = packed.as_strided(((heads - 1) * per_head + (num_tokens - 1) * per_token + 1, width), (width, 1))
        shared = num_heads // heads
        if (per_head, per_token, shared) not in self._indices:
            index = self.tokens * per_token + (self.heads // shared) * per_head
            self._indices[per_head, per_token, shared] = index
        return rows.index_select(0, self._indices[per_head, per_token, shared])

    def ungathered(self, rows: Tensor, heads: int) -> Tensor:
        """Gradients [N, K] -> [1, G, T, K]: of the query heads that share one of `heads`, the sum."""
        tokens = rows.index_select(0, self.places).view(self.num_tokens, heads, -1, rows.shape[1])
        summed = tokens[:, :, 0] if tokens.shape[2] == 1 else tokens.sum(dim=2)
        return summed.transpose(0, 1)[None]


class ShortAttention(torch.autograd.Function):
    """softmax(scaling * q k' + mask) v of each sequence, with gradients."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, mask: Tensor, scaling: float | None
    ) -> Tensor:
        """query [1, H, T, K], key and value [1, G, T, K], mask [L, L] with 0 or -inf for the longest L
        -> [1, T, H, K]."""
        num_heads = query.shape[1]
        scaling = 1 / math.sqrt(query.shape[3]) if scaling is None else scaling
        ctx.blocks, ctx.scaling, ctx.heads = blocks, scaling, [each.shape[1] for each in (query, key, value)]
        query, key, value = (blocks.gathered(each, num_heads) for each in (query, key, value))
        query.mul_(scaling)
        result = value.new_empty(len(value), value.shape[1])
        kept = []
        for q, k, v, to in blocks.split(query, key, value, result):
            length = q.shape[1]
            weights = torch.baddbmm(mask[:length, :length], q, k.transpose(1, 2))
            torch.softmax(weights, dim=-1, out=weights)
            torch.bmm(weights, v, out=to)
            if any(ctx.needs_input_grad):
                kept.append(weights)
        ctx.save_for_backward(query, key, value, *kept)
        return result.index_select(0, blocks.places).view(1, blocks.num_tokens, num_heads, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        gradient = blocks.gathered(gradient.transpose(1, 2), ctx.heads[0])
        if blocks.real is not None:
            gradient.mul_(blocks.real)  # padding attends to real tokens, and must not move them
        found = [torch.empty_like(each) for each in (query, key, value)]
        parts = blocks.split(query, key, value, gradient, *found)
        for weights, (q, k, v, g, to_query, to_key, to_value) in zip(kept, parts, strict=True):
            torch.bmm(weights.transpose(1, 2), g, out=to_value)
            scores = torch.bmm(g, v.transpose(1, 2))
            aten._softmax_backward_data.out(scores, weights, -1, weights.dtype, grad_input=scores)
            torch.bmm(scores, k, out=to_query)
            torch.bmm(scores.transpose(1, 2), q, out=to_key)
        found[0].mul_(ctx.scaling)
        each = (blocks.ungathered(rows, heads) for rows, heads in zip(found, ctx.heads, strict=True))
        return *each, None, None, None
