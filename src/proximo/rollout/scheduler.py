"""Assigns samples to rows of the cache for continuous batching. Works on integers only, without tensors.

Prompts are served in their order, each with all its samples. So at most one prompt is partly admitted, and only its
keys and values must be kept for later samples. A sample that ends frees its row at once for the next sample. If no
sample is waiting, the last row moves into the free row, so that active rows are always the first ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Identifies the sample in a row."""

    prompt_index: int
    sample_index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Consecutive samples of one prompt, beginning with `first_sample`, and the row of each."""

    prompt_index: int
    first_sample: int
    rows: tuple[int, ...]

    @property
    def needs_prefill(self) -> bool:
        """True for the first samples of a prompt, which has not been computed yet."""
        return self.first_sample == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """The sample in row `source` continues in row `target`."""

    source: int
    target: int


class Scheduler:
    """Schedules one call of the engine, from the first prompt to the last sample."""

    def __init__(self, prompt_lengths: Sequence[int], *, num_samples: int, num_rows: int, prefill_tokens: int) -> None:
        """`prefill_tokens`: most prompt tokens of one call of `admit`. A longer prompt is admitted alone."""
        self.rows: list[Slot | None] = []
        self._prompt_lengths = list(prompt_lengths)
        self._num_samples = num_samples
        self._num_rows = num_rows
        self._prefill_tokens = prefill_tokens
        self._next = Slot(prompt_index=0, sample_index=0)

    @property
    def done(self) -> bool:
        """True if no sample is in a row and none is waiting."""
        return not self._waiting and all(slot is None for slot in self.rows)

    def admit(self) -> list[Admission]:
        """Give free rows to waiting samples, within the token budget. Call it until it returns an empty list."""
        free = [row for row, slot in enumerate(self.rows) if slot is None] + list(range(len(self.rows), self._num_rows))
        admissions: list[Admission] = []
        num_tokens = 0
        while free and self._waiting:
            if self._next.sample_index == 0:
                length = self._prompt_lengths[self._next.prompt_index]
                if num_tokens > 0 and num_tokens + length > self._prefill_tokens:
                    break
                num_tokens += length
            count = min(len(free), self._num_samples - self._next.sample_index)
            admissions.append(self._occupy(free[:count]))
            free = free[count:]
        return admissions

    def release(self, rows: Iterable[int]) -> None:
        """Free these rows, because their samples have ended."""
        for row in rows:
            assert self.rows[row] is not None, f"row {row} holds no sample"
            self.rows[row] = None

    def compact(self) -> list[Move]:
        """Move samples from the last rows into free rows, until no row is empty."""
        moves: list[Move] = []
        for target in range(len(self.rows)):
            while self.rows and self.rows[-1] is None:
                self.rows.pop()
            if target < len(self.rows) and self.rows[target] is None:
                moves.append(Move(source=len(self.rows) - 1, target=target))
                self.rows[target] = self.rows.pop()
        return moves

    @property
    def _waiting(self) -> bool:
        return self._next.prompt_index < len(self._prompt_lengths)

    def _occupy(self, rows: list[int]) -> Admission:
        prompt, first = self._next.prompt_index, self._next.sample_index
        for offset, row in enumerate(rows):
            slot = Slot(prompt_index=prompt, sample_index=first + offset)
            if row < len(self.rows):
                self.rows[row] = slot
            else:
                self.rows.append(slot)
        after = first + len(rows)
        finished = after == self._num_samples
        self._next = Slot(prompt_index=prompt + finished, sample_index=0 if finished else after)
        return Admission(prompt_index=prompt, first_sample=first, rows=tuple(rows))
