"""Copies of shared prefixes, for attention that takes the keys of each sequence in one piece.

Legend: S segments, T tokens of a row, C tokens of the row with the copies.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from proximo.models.packing import prefix_lengths, send


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
