"""What a run computed, as it lies in its folder, and the demand that two runs computed the same bits."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

from proximo.checkpoint.atomic import TEMPORARY_PREFIX
from proximo.metrics.catalogue import catalogue


def outcome(folder: Path) -> dict[str, Any]:
    """Everything that interrupting a run must not change, by name; raises AssertionError for a folder left untidy.

    Every file of the latest and of the best checkpoint (weights, optimizers, state, tokenizer, manifest) as its hash;
    every line of the logs, in metrics.jsonl without what the machine decides.
    """
    checkpoints = folder / "checkpoints"
    unfinished = [path.name for path in folder.rglob(f"{TEMPORARY_PREFIX}*")]
    assert not unfinished, f"left behind: {unfinished}"
    found: dict[str, Any] = {}
    for pointer in ("latest", "best"):
        name = (checkpoints / pointer).read_text().strip()
        found[pointer] = name
        found |= {
            f"{name}/{path.relative_to(checkpoints / name).as_posix()}": hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((checkpoints / name).rglob("*"))
            if path.is_file()
        }
    metrics = read_lines(folder / "metrics.jsonl")
    steps = [line["step"] for line in metrics]
    assert steps == list(range(len(steps))), f"steps in metrics.jsonl: {steps}"
    for line in metrics:
        found[f"metrics of step {line['step']}"] = catalogue().repeatable(line)
    found["samples"] = read_lines(folder / "samples.jsonl")
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def assert_same_outcome(folder: Path, expected: dict[str, Any], *, after: str) -> None:
    """Raises AssertionError that names what differs from the uninterrupted run, and after which interruption."""
    try:
        actual = outcome(folder)
    except AssertionError as error:
        raise AssertionError(f"killed {after}, then resumed: {error}") from error
    differing = [name for name in (actual | expected) if actual.get(name) != expected.get(name)]
    shown = "".join(f"\n  {name}: {actual.get(name)} != {expected.get(name)}" for name in differing[:3])
    assert not differing, f"killed {after}, then resumed: {', '.join(differing)} differ{shown}"


def assert_steps_once_in_tensorboard(folder: Path, num_steps: int) -> None:
    """Raises AssertionError where the event files do not have every step of a curve exactly once, from 0 on."""
    events = EventAccumulator(str(folder), size_guidance={TENSORS: 0})  # 0 keeps all, the default ten
    events.Reload()
    steps = [event.step for event in events.Tensors("progress/step")]
    assert steps == list(range(num_steps + 1)), f"steps in TensorBoard: {steps}"
