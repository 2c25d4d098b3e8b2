"""Decoding passes as graphs: the host launches a pass as a whole, in place of hundreds of kernels one by one.

A graph is of one number of rows, rounded up to a power of two: the last row stands in for those that are missing, and
writes the same numbers to the same places. Its inputs lie at fixed addresses, and it moves them on to the next pass. It
belongs to the weights, and to the storage of the cache, that it was captured with. Each graph is tried on the pass that
it is captured from: where it draws other tokens, or where the model's code cannot be captured, passes run one by one.

Legend: B rows that decode, R rows of a graph.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from proximo.kernels import Capture
from proximo.models.packing import send
from proximo.rollout.sampling import Drawn, SamplingOptions

if TYPE_CHECKING:  # transformers takes seconds to import
    from proximo.models.attention.cache import RowCache
    from proximo.models.attention.cache_layouts import RowLayout

LEAST_PASSES = 16
"""A graph is made if so many passes may follow. To capture one takes the time of about five passes."""
_TRIED = 2
"""Passes of a trial, so that the second shows whether the inputs were moved on. A cache has room for the block that
follows, of which these are the first."""

Draw = Callable[[Tensor, "RowLayout", Tensor, Tensor], Drawn]
"""Runs one pass: tokens [R], the layout, streams [R], positions [R] of the draws -> what is drawn."""


_REFUSED: WeakKeyDictionary[nn.Module, set[tuple[object, ...]]] = WeakKeyDictionary()
"""Of models, the ways to draw whose passes were tried and cannot be graphs, or draw other tokens as such."""


class DecodingGraphs:
    """The graphs of one call of `generate` or of a session, by their rows."""

    def __init__(
        self, model: nn.Module, cache: "RowCache", draw: Draw, *, options: SamplingOptions, capture: Capture
    ) -> None:
        """`draw` draws by `options`. Its owner lets the graphs go in the end: a cycle would keep both in memory."""
        self._model = model
        self._way = (options.greedy, options.top_k, options.top_p, options.min_new_tokens > 0)
        """Passes that draw in another way have other operators, which may be captured where these cannot."""
        self._cache = cache
        self._draw = draw
        self._capture = capture
        self._passes: dict[int, _FixedPass] = {}
        self._storage = 0
        """The cache's `num_storages` that they know."""

    def decode(self, rows: Sequence[int], numbers: np.ndarray, *, count: int, passes_left: int) -> list[Drawn] | None:
        """Decode `count` tokens for each of B rows of the cache; None where passes have to run one by one.

        `numbers` [3, B]: tokens, streams, positions of the first draws. `passes_left`: how many may follow in all.
        """
        size = 1 << (len(rows) - 1).bit_length()
        if self._way in _REFUSED.get(self._model, ()) or (size not in self._passes and passes_left < LEAST_PASSES):
            return None
        lengths = self._cache.reserve(rows, count)
        if self._storage != self._cache.num_storages:
            self._passes, self._storage = {}, self._cache.num_storages
        inputs = np.concatenate([numbers, np.array([lengths, rows])])
        inputs = np.pad(inputs, [(0, 0), (0, size - len(rows))], mode="edge")
        on_device = send(torch.from_numpy(inputs), self._cache.device)
        if size not in self._passes:
            made = _FixedPass(size, self._cache, self._draw)
            why_not = made.capture(on_device, self._capture)
            if why_not is not None:
                _REFUSED.setdefault(self._model, set()).add(self._way)
                warnings.warn(f"decoding takes no graphs: {why_not}", stacklevel=2)
                for row, length in zip(rows, lengths, strict=True):
                    self._cache.cut(row, length)
                return None
            self._passes[size] = made
        return self._passes[size].replay(on_device, count=count, num_rows=len(rows))


class _FixedPass:
    """A pass whose inputs and results lie at fixed addresses."""

    def __init__(self, num_rows: int, cache: "RowCache", draw: Draw) -> None:
        device = cache.device
        self._inputs = torch.zeros(5, num_rows, dtype=torch.int64, device=device)
        """Tokens, streams, positions of the draws, positions in the cache, and rows."""
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(num_rows, device=device)
        self._allowed: Tensor | None = None
        """What was drawn from, if tokens are left out; its width is known after the first pass."""
        self._cache, self._draw = cache, draw
        self._again: Callable[[], None] | None = None

    def _run(self) -> None:
        tokens, streams, draws, positions, rows = self._inputs
        drawn = self._draw(tokens, self._cache.one_pass(positions, rows), streams, draws)
        self._tokens.copy_(drawn.tokens)
        self._logprobs.copy_(drawn.logprobs)
        if drawn.allowed is not None:
            self._allowed = torch.empty_like(drawn.allowed) if self._allowed is None else self._allowed
            self._allowed.copy_(drawn.allowed)
        tokens.copy_(drawn.tokens)
        draws.add_(1)
        positions.add_(1).clamp_(max=self._cache.max_tokens - 1)

    def capture(self, inputs: Tensor, capture: Capture) -> str | None:
        """Make the graph, and compare two replays with two passes. Returns why it is not to be used; None if it is."""
        self._inputs.copy_(inputs)
        expected = []
        for _ in range(_TRIED):  # also makes what is made once: casts of weights, kernels, workspaces
            self._run()
            expected.append((self._tokens.clone(), self._logprobs.clone()))
        try:
            self._again = capture(self._run)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        self._tokens.fill_(-1)
        self._logprobs.fill_(torch.nan)
        replayed = self.replay(inputs, count=_TRIED, num_rows=len(self._tokens))
        right = all(
            drawn.tokens.equal(tokens) and torch.allclose(drawn.logprobs, logprobs, rtol=1e-3, atol=1e-3)
            for drawn, (tokens, logprobs) in zip(replayed, expected, strict=True)
        )
        return None if right else "a graph of a pass draws other tokens than the pass"

    def replay(self, inputs: Tensor, *, count: int, num_rows: int) -> list[Drawn]:
        """What `count` passes draw for the first `num_rows` rows."""
        assert self._again is not None
        self._inputs.copy_(inputs)
        drawn = []
        for _ in range(count):
            self._again()
            allowed = None if self._allowed is None else self._allowed[:num_rows].clone()
            drawn.append(Drawn(self._tokens[:num_rows].clone(), self._logprobs[:num_rows].clone(), allowed))
        return drawn
