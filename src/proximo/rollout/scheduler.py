"""Which sample gets which row, and when: continuous batching in integers. Knows no tensor, token or model.

Prompts are served first come, first served, each with all its samples, so that at most one prompt is partly admitted
and waits with its keys and values. A sample that ends frees its row at once; the next sample takes it, and where none
waits, the last row moves into the hole, so that active rows are always the first ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The sample that a row holds."""

    prompt_index: int
    sample_index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Samples `first_sample`, `first_sample + 1`, ... of one prompt, and the row of each."""

    prompt_index: int
    first_sample: int
    rows: tuple[int, ...]

    @property
    def needs_prefill(self) -> bool:
        """True for a prompt's first samples: nothing of it has been computed yet."""
        return self.first_sample == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """The sample in row `source` goes on in row `target`."""

    source: int
    target: int


class Scheduler:
    """One call of the engine from the first prompt to the last sample."""

    def __init__(self, prompt_lengths: Sequence[int], *, num_samples: int, num_rows: int, prefill_tokens: int) -> None:
        """`prefill_tokens` bounds the prompt tokens of one admission; a longer prompt is admitted alone."""
        self.rows: list[Slot | None] = []
        self._prompt_lengths = list(prompt_lengths)
        self._num_samples = num_samples
        self._num_rows = num_rows
        self._prefill_tokens = prefill_tokens
        self._next = Slot(prompt_index=0, sample_index=0)

    @property
    def done(self) -> bool:
        """True when no sample is in a row and none waits."""
        return not self._waiting and all(slot is None for slot in self.rows)

    def admit(self) -> list[Admission]:
        """Give free rows to waiting samples, under the token budget; call again until nothing comes."""
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
        """The samples in these rows have ended."""
        for row in rows:
            assert self.rows[row] is not None, f"row {row} holds no sample"
            self.rows[row] = None

    def compact(self) -> list[Move]:
        """Close the holes among the rows with samples from the end; afterwards no row is empty."""
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
