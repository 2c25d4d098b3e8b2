"""Reads the files of a run folder, for the report and the tables. Any file may be missing.

An unfinished run is read as far as it goes. Unreadable lines are counted.
"""

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRAINING_SAMPLES_KEPT = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One response of samples.jsonl. Fields that a trainer does not have (such as a gold score) are None."""

    step: int
    kind: str
    """`train`, `evaluation`, or `labelled` for a held-out answer of the data."""
    prompt_id: str
    prompt: str
    response: str
    score: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    gold: float | None = None
    kl: float | None = None
    num_tokens: int | None = None
    finish: str | None = None
    reason: str | None = None
    """Why the response or its scoring failed; None if neither did."""
    reference_response: str | None = None
    """The reference model's response to the same prompt; None if it was not sampled."""
    reference_score: float | None = None
    desirable: bool | None = None
    """The label of a held-out answer of the data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredPair:
    """One held-out preference pair of samples.jsonl (kind `pair`), with its scores."""

    step: int
    prompt: str
    chosen: str
    rejected: str
    score_chosen: float
    score_rejected: float

    @property
    def margin(self) -> float:
        return self.score_chosen - self.score_rejected


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """The samples of samples.jsonl that a report shows."""

    first_evaluation: tuple[Sample, ...] = ()
    last_evaluation: tuple[Sample, ...] = ()
    """Empty if there was only one evaluation."""
    training: tuple[Sample, ...] = ()
    """The last TRAINING_SAMPLES_KEPT training samples, or labelled answers."""
    pairs: tuple[ScoredPair, ...] = ()
    """The pairs of the last evaluation."""
    num_unreadable: int = 0


@dataclass(frozen=True, slots=True)
class Series:
    """The values of one metric, at the steps that have it."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended, from outcome.json."""

    state: str
    """`finished`, `stopped` (by a signal, can be resumed) or `failed`."""
    total_steps: int
    """Planned number of steps."""
    reason: str | None = None
    """The error, if the run failed; why it took no update, if it finished so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The contents of a run folder."""

    name: str
    lines: tuple[Mapping[str, float], ...] = ()
    """Lines of metrics.jsonl, one per step in order, with `step` and finite numbers only."""
    samples: Samples = field(default_factory=Samples)
    config: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] | None = None
    outcome: Outcome | None = None
    """None for a run that is still running or was killed."""
    total_steps: int | None = None
    """Planned number of steps; None if unknown."""
    num_unreadable: int = 0
    """Lines of metrics.jsonl that could not be read."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all recorded metrics."""
        return tuple(dict.fromkeys(name for line in self.lines for name in line if name != "step"))

    @property
    def last_step(self) -> int | None:
        return int(self.lines[-1]["step"]) if self.lines else None

    @property
    def failure(self) -> str | None:
        """Why the run failed; None if it did not."""
        if self.outcome is None or self.outcome.state != "failed":
            return None
        return self.outcome.reason or "no reason given"

    def series(self, name: str) -> Series:
        """The values of a metric; empty if the run does not have it."""
        points = [(int(line["step"]), line[name]) for line in self.lines if name in line]
        return Series(tuple(step for step, _ in points), tuple(value for _, value in points))


def read_run(folder: Path, *, name: str | None = None) -> Run:
    """Read the run in a folder. Raises FileNotFoundError if there is no such folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"a run folder was to be read, but there is no folder {folder}")
    lines, num_unreadable = _read_lines(folder / "metrics.jsonl")
    outcome, config = _read_outcome(folder / "outcome.json"), _read_json(folder / "config.resolved.json")
    return Run(
        name=name or folder.resolve().name,
        lines=lines,
        samples=_read_samples(folder / "samples.jsonl"),
        config=config,
        environment=_read_json(folder / "environment.json"),
        outcome=outcome,
        total_steps=outcome.total_steps if outcome else _planned_steps(config, lines),
        num_unreadable=num_unreadable,
    )


def _planned_steps(config: Mapping[str, Any] | None, lines: tuple[Mapping[str, float], ...]) -> int | None:
    """Planned steps of an unfinished run, from its configuration or its epochs so far; None if unknown."""
    done = lines[-1].get("progress/epoch", 0.0) if lines else 0.0
    for section in (config or {}).values():  # that of the trainer alone has either
        epochs, steps = (setting(section, key) for key in ("num_epochs", "num_steps"))
        if epochs and done > 0:
            return math.ceil(lines[-1]["step"] * epochs / done - 1e-6)
        if steps:
            return steps
    return None


def setting(config: object, *keys: str) -> Any:
    """The value at a path of nested keys; None if a key is missing."""
    for key in keys:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def _read_outcome(path: Path) -> Outcome | None:
    try:
        return Outcome(**(_read_json(path) or {}))
    except TypeError:
        return None


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    return _parse(path.read_text(encoding="utf-8", errors="replace"))


def _parse(text: str) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _records(path: Path) -> Iterator[dict[str, Any] | None]:
    """The records of a JSON lines file; None for an unreadable line (the last one may be incomplete)."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            yield _parse(line)


def _read_lines(path: Path) -> tuple[tuple[Mapping[str, float], ...], int]:
    lines: list[Mapping[str, float]] = []
    num_unreadable = 0
    for record in _records(path):
        if record is None or not isinstance(record.get("step"), int):
            num_unreadable += 1
            continue
        lines.append({name: value for name, value in record.items() if _is_finite_number(value)})
    return tuple(lines), num_unreadable


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_samples(path: Path) -> Samples:
    first: list[Sample] = []
    last: list[Sample] = []
    training: deque[Sample] = deque(maxlen=TRAINING_SAMPLES_KEPT)
    pairs: list[ScoredPair] = []
    num_unreadable = 0
    for record in _records(path):
        entry = _sample(record) if record else None
        match entry:
            case None:
                num_unreadable += 1
            case ScoredPair():
                pairs = pairs if pairs and pairs[0].step == entry.step else []
                pairs.append(entry)
            case Sample(kind="evaluation") if not first or first[0].step == entry.step:
                first.append(entry)
            case Sample(kind="evaluation"):
                last = last if last and last[0].step == entry.step else []
                last.append(entry)
            case _:
                training.append(entry)
    return Samples(
        first_evaluation=tuple(first),
        last_evaluation=tuple(last),
        training=tuple(training),
        pairs=tuple(pairs),
        num_unreadable=num_unreadable,
    )


def _sample(record: Mapping[str, Any]) -> Sample | ScoredPair | None:
    kind = ScoredPair if record.get("kind") == "pair" else Sample
    known = {name: value for name, value in record.items() if name in kind.__dataclass_fields__ and value is not None}
    try:
        return kind(**known)
    except TypeError:
        return None
