"""The interface of a training task, which the run loop (loop.py) drives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proximo.checkpoint.ranks import RankWriter, Writer
from proximo.checkpoint.reading import Checkpoint
from proximo.metrics.values import MetricValue


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Metrics and samples of a step or an evaluation."""

    metrics: Mapping[str, MetricValue]
    samples: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    """Rows of samples.jsonl, without the step number."""
    guard: str | None = None
    """Why a guard ends the run after this step; None to continue."""


class Task(Protocol):
    """A training task that the loop drives. Steps count from 1; a step depends only on its number and the state."""

    num_steps: int
    device: str
    inputs_fingerprint: Mapping[str, Any]
    """Digests that must be unchanged on resume: data, tokenizers, and models that checkpoints do not hold."""
    notes: Sequence[str]
    """Lines for the log: what was loaded, and which rows were dropped."""
    held_out: Sequence[Any]
    """The data that it evaluates on; empty if it does not evaluate."""
    best_metric: str | None
    """The evaluation metric that ranks checkpoints, if any; higher is better unless `best_is_lowest`."""
    best_is_lowest: bool

    def step(self, step: int) -> Record:
        """Take one step, and return its metrics and samples.

        Raises GuardError if a guard ends the run before the step has changed anything.
        """
        ...

    def evaluate(self, num_rows: int | None = None) -> Record | None:
        """Evaluate on held-out data, or on its first `num_rows` rows; None if there is none."""
        ...

    def writers(self) -> Mapping[str, Writer | RankWriter]:
        """Name -> writer of each file or folder of a checkpoint, apart from the state."""
        ...

    def state(self) -> Mapping[str, Any]:
        """State that a checkpoint keeps as JSON."""
        ...

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore what `writers` and `state` saved."""
        ...

    def close(self) -> None:
        """Stop worker processes and close connections."""
        ...
