"""A session of the built-in engine: continuous batching of calls that arrive while others are decoded.

Every pass is made of tokens that follow the cached beginning of their row: one for a call that decodes, several for one
that begins, which reads what its lane's last call has not computed. Where the last of a row's ids is computed, the next
one is drawn. A row whose call has ended keeps its keys and values until its lane calls again or another lane needs the
row.

With the kernels of a CPU the results of a token are the same to the bit, whatever the other tokens of its pass are. So
neither other calls, nor the order in which they come, nor a cache that was dropped change what is sampled. Elsewhere
log-probs differ by rounding.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from proximo.data.codec import end_of_prompt
from proximo.errors import TrainingError
from proximo.models.attention.cache import PromptCache, RowCache
from proximo.models.language import LanguageModel
from proximo.models.packing import pack, send
from proximo.models.precision.compute import Casts, casting
from proximo.rollout.decoding import Growing, RowDecoding, passes_at_once
from proximo.rollout.session import CallRequest, ModelCall, check_call
from proximo.rollout.stopping import StopRules

_SHARED_TOKENS = 16
"""A lane without cache copies the beginning that it has in common with another row, from so many tokens on."""
_MOST_ROWS, _MOST_BYTES = 512, 2**30
"""Beyond the rows of running calls there are rows to keep, as long as all rows together are within both."""
_FIRST_ROWS, _FIRST_TOKENS = 8, 128
"""Rows of the cache at first, and tokens for which each has room. Both grow by doubling."""


@dataclass(kw_only=True, eq=False, slots=True)
class _Call(Growing):
    """A call that is being decoded."""

    request: CallRequest


@dataclass(kw_only=True, eq=False, slots=True)
class _Row:
    """A row of the cache. It is empty, or a call runs in it, or it is kept for the lane of a call that ended."""

    ids: list[int]
    """All ids of its lane, of which the cache has the first; none of an empty row."""
    lane: Hashable = None
    is_kept: bool = False
    """Whether its lane calls nothing now."""
    since: int = 0
    """Of a kept row: the number of rows that were kept before it."""


class LocalSession(RowDecoding):
    """See `Session`. One thread at a time calls `advance`."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        stop: StopRules,
        prefill_tokens: int,
        version: Callable[[], int],
        turn: Callable[[], AbstractContextManager[None]],
        num_slots: int,
        max_tokens: int,
    ) -> None:
        """`num_slots`: calls decoded at a time. `prefill_tokens`: most tokens that calls read in one pass.

        `version`: of the weights, which change only outside of `turn`.
        """
        rows = min(_FIRST_ROWS, num_slots)
        cache = RowCache(num_rows=rows, initial_tokens=_FIRST_TOKENS, max_tokens=max_tokens)
        super().__init__(model, cache=cache, stop=stop, prefill_tokens=prefill_tokens, version=version)
        self._turn = turn
        self._num_slots = self._most_rows = num_slots
        self._max_tokens = max_tokens
        self._rows = [_Row(ids=[]) for _ in range(rows)]
        self._calls: dict[int, _Call] = {}
        """The calls that run, by their rows, in the order in which they began."""
        self._reading: set[int] = set()
        """Those of their rows that lack more than their last id."""
        self._num_kept = 0
        self._casts = Casts()
        self._changed = threading.Condition()
        """Guards what follows: other threads submit and forget."""
        self._waiting: list[CallRequest] = []
        self._forgotten: set[Hashable] = set()
        self._num_running = 0
        self._failure: BaseException | None = None

    @property
    def num_running(self) -> int:
        """Calls that were submitted and have not ended."""
        return self._num_running

    def submit(self, request: CallRequest) -> None:
        """Add a call, from any thread. Raises UserError for one that does not fit, TrainingError after the end."""
        check_call(request, max_tokens=self._max_tokens, max_positions=self._model.position_limit)
        with self._changed:
            self._raise_failure()
            self._waiting.append(request)
            # What has begun goes first: its cache is still there, and no trajectory waits for all others to begin.
            self._waiting.sort(key=lambda each: each.first_position == 0)
            self._num_running += 1
            self._changed.notify_all()

    def forget(self, lane: Hashable) -> None:
        """Drop the cache of a lane, and its calls that have not ended, from any thread."""
        with self._changed:
            self._forgotten.add(lane)
            kept = [request for request in self._waiting if request.lane != lane]
            self._num_running -= len(self._waiting) - len(kept)
            self._waiting = kept

    def advance(self, wait_seconds: float) -> list[ModelCall]:
        """Decode one block of tokens of all running calls; returns those that ended. Waits at most so long for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_running or self._failure is not None, wait_seconds)
            self._raise_failure()
        try:
            with self._turn():
                return self._step()
        except BaseException as error:
            self.end(error)
            raise

    def end(self, reason: BaseException) -> None:
        """End the session and all its calls. Whoever uses it from now on is told the reason."""
        with self._changed:
            self._failure = self._failure or reason
            self._waiting.clear()
            self._num_running = 0
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise TrainingError(f"the session has ended: {self._failure}") from self._failure

    # All code that touches the cache runs in inference mode, because inference tensors cannot be changed outside of it.
    @torch.inference_mode()
    def _step(self) -> list[ModelCall]:
        """Begin waiting calls and decode one block. Returns the calls that ended."""
        if self.has_stale_cache:
            self._compute_anew()
        with casting(self._casts):  # once for all passes with the same weights
            self._drop_forgotten()
            self._begin_waiting()
            if self._reading and passes_at_once(self._device) == 1:
                self._mixed_pass()
            elif self._calls:
                self._read_all()
                self._decode_block()
        return [self._ended(row) for row, call in list(self._calls.items()) if call.finish is not None]

    def _compute_anew(self) -> None:
        """Forget all keys and values, which other weights made. Passes compute those of running calls again."""
        self._renew()
        self._casts = Casts()
        for row, each in enumerate(self._rows):
            if each.is_kept:
                self._empty(row)
        for row, call in self._calls.items():
            self._cache.cut(row, 0)
            self._reading.add(row)
            call.versions.append((self._version, len(call.token_ids)))

    def _drop_forgotten(self) -> None:
        with self._changed:
            forgotten, self._forgotten = self._forgotten, set()
            lost = [row for row, each in enumerate(self._rows) if each.ids and each.lane in forgotten]
            self._num_running -= sum(row in self._calls for row in lost)
        for row in lost:
            self._calls.pop(row, None)
            self._reading.discard(row)
            self._empty(row)

    def _empty(self, row: int) -> None:
        self._rows[row] = _Row(ids=[])
        self._cache.cut(row, 0)

    def _begin_waiting(self) -> None:
        """Give rows to waiting calls, as many as may run.

        Of calls that begin alike, such as the first ones of a group, the first computes the beginning for all.
        """
        with self._changed:
            count = self._num_slots - len(self._calls)
            requests, self._waiting = self._waiting[:count], self._waiting[count:]
        if requests and not self._cache.is_allocated:
            self._allocate(requests[0].token_ids[0])
        while requests := [request for request in requests if not self._begin(request)]:
            self._read_all()

    def _allocate(self, token_id: int) -> None:
        """One token through the model shows the shapes and the types of its keys and values."""
        prompt = PromptCache([1])
        self._model.prefill(pack([[token_id]], device=self._device), prompt)
        self._cache.place(prompt, 0, [0])
        self._cache.cut(0, 0)
        of_token = sum(states.nbytes for pair in prompt.captured.values() for states in pair)
        self._most_rows = max(self._num_slots, min(_MOST_ROWS, _MOST_BYTES // (of_token * self._max_tokens)))

    def _begin(self, request: CallRequest) -> bool:
        """Begin a call in a row. False if another call has yet to read a beginning that this one could copy."""
        ids = list(request.token_ids)
        row, known = self._best_row(ids, lambda each: each.is_kept and each.lane == request.lane, least=0)
        if row is None:
            source, known = self._best_row(ids, lambda _: True, least=_SHARED_TOKENS)
            if self._will_be_known(ids) >= known + _SHARED_TOKENS:
                return False
            row = self._take_row(besides=source)
            if source is not None and source != row:
                self._cache.copy(source, row, known)
        self._cache.cut(row, known)
        needs_text = self._stop.options.stop_strings
        call = _Call(
            what=f"the call {request.id!r}",
            prompt_end=end_of_prompt(self._stop.tokenizer, ids) if needs_text else ids[-1:],
            stream=request.stream,
            limit=request.max_new_tokens,
            first_position=request.first_position,
            versions=[(self._version, 0)],
            request=request,
        )
        self._rows[row] = _Row(ids=ids, lane=request.lane, is_kept=False)
        self._calls[row] = call
        if known < len(ids) - 1:
            self._reading.add(row)
        return True

    def _best_row(self, ids: list[int], may_be: Callable[[_Row], bool], *, least: int) -> tuple[int | None, int]:
        """The row with most of the beginning of `ids` in its cache, and how much; None, 0 if that is below `least`."""
        found = [
            (min(_num_alike(each.ids[: self._cache.lengths[row]], ids), len(ids) - 1), row)
            for row, each in enumerate(self._rows)
            if may_be(each) and each.ids[:least] == ids[:least]
        ]
        known, row = max(found, default=(0, None))
        return (row, known) if known >= least else (None, 0)

    def _will_be_known(self, ids: list[int]) -> int:
        """How much of the beginning of `ids` rows will have when they have read all but the last of their own ids."""
        first = ids[:_SHARED_TOKENS]
        read = (self._rows[row].ids[:-1] for row in self._reading)
        rows = (each for each in read if each[:_SHARED_TOKENS] == first)
        return min(max((_num_alike(each, ids) for each in rows), default=0), len(ids) - 1)

    def _take_row(self, *, besides: int | None) -> int:
        """An empty row, a new one, or the one that was kept longest; `besides` only if there is no other."""
        empty = next((row for row, each in enumerate(self._rows) if not each.ids), None)
        if empty is not None:
            return empty
        count = len(self._rows)
        if count < self._most_rows:
            more = min(self._most_rows - count, count)
            self._cache.add_rows(more)
            self._rows += [_Row(ids=[]) for _ in range(more)]
            return count
        kept = (row for row, each in enumerate(self._rows) if each.is_kept)
        return min(kept, key=lambda row: (row == besides, self._rows[row].since))

    def _read_all(self) -> None:
        """Compute all but the last id of running calls."""
        while self._reading and (parts := self._next_parts(besides=1)):
            self._read(parts)
        self._reading.clear()

    def _next_parts(self, *, besides: int) -> list[tuple[int, int]]:
        """Rows, each with the number of ids that it reads in one pass. `besides`: how many of its last ids to leave."""
        parts, room = [], self._prefill_tokens
        for row in self._calls:
            count = len(self._rows[row].ids) - self._cache.lengths[row] - besides
            if count > 1 - besides:
                count = min(count, room)
                room -= count
            if count > 0:
                parts.append((row, count))
        return parts

    def _read(self, parts: Sequence[tuple[int, int]]) -> Tensor:
        """Compute the next ids of rows -> hidden states [T, D], in the order of `parts`."""
        rows, counts = zip(*parts, strict=True)
        begins = [self._cache.lengths[row] for row in rows]
        ids = chain.from_iterable(
            self._rows[row].ids[begin : begin + count] for row, begin, count in zip(rows, begins, counts, strict=True)
        )
        layout = self._cache.extend(rows, counts)
        tokens = send(torch.tensor(list(ids)), self._device)
        return self._made_decoder()(tokens, layout.positions, self._cache, layout)

    def _mixed_pass(self) -> None:
        """One pass: some rows decode, others read."""
        parts = self._next_parts(besides=0)
        hidden = self._read(parts)
        lasts = accumulate(count for _, count in parts)
        complete = {
            row: last - 1
            for (row, _), last in zip(parts, lasts, strict=True)
            if self._cache.lengths[row] == len(self._rows[row].ids)
        }
        self._reading.difference_update(complete)
        if not complete:
            return
        calls = [self._calls[row] for row in complete]
        if len(complete) < len(hidden):
            hidden = hidden[list(complete.values())]
        self._draw(calls, self._head.logits(hidden))
        for row, call in zip(complete, calls, strict=True):
            self._rows[row].ids.append(call.token_ids[-1])

    def _decode_block(self) -> None:
        """A block of tokens for rows that lack nothing else."""
        before = [len(call.token_ids) for call in self._calls.values()]
        self._decode_rows(list(self._calls), list(self._calls.values()))
        for (row, call), count in zip(self._calls.items(), before, strict=True):
            self._rows[row].ids += call.token_ids[count:]

    def _ended(self, row: int) -> ModelCall:
        """The result of a call that ended. Its row is kept."""
        call, kept = self._calls.pop(row), self._rows[row]
        assert call.finish is not None
        self._num_kept += 1
        kept.is_kept, kept.since = True, self._num_kept
        with self._changed:
            self._num_running -= 1
        starts = {first: version for version, first in call.versions}  # the last of several before one token
        return ModelCall(
            request=call.request,
            token_ids=tuple(call.token_ids),
            logprobs=tuple(call.logprobs),
            finish=call.finish,
            sampling_mask=call.sampling_mask,
            versions=tuple((version, first) for first, version in sorted(starts.items())),
        )


def _num_alike(ids: list[int], others: list[int]) -> int:
    """With how many ids both begin."""
    count = min(len(ids), len(others))
    if ids[:count] == others[:count]:
        return count
    return next(i for i in range(count) if ids[i] != others[i])
