"""Seconds of each phase of a step and the memory of the process, noted from outside the code that is measured.

Used inside every side's process. A side calls `mark` at the end of a phase and `end_step` at the end of a step; where
the trainer has no such places, forward hooks on its models call them.
"""

import json
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

PHASES = ("rollout", "scoring", "training")


def status_mib(field: str) -> float:
    """Of this process: VmRSS now, VmHWM at its greatest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


class Stopwatch:
    """Made after the imports and before the models are loaded."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.imported_mib = status_mib("VmRSS")
        self.steps: list[dict[str, Any]] = []
        self._phases: dict[str, float] = {}
        self._lengths: list[int] = []
        self._last = time.perf_counter()

    def begin(self) -> None:
        """Time begins to count here."""
        self._phases, self._lengths, self._last = {}, [], self._now()

    def _now(self) -> float:
        """When the device has done what it was told."""
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def mark(self, phase: str) -> None:
        """What passed since the last call belongs to this phase."""
        now = self._now()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
        self._last = now

    def count(self, lengths: Sequence[int]) -> None:
        """Tokens of each of these responses, the stop token among them, which are of this step."""
        self._lengths += lengths

    def taken(self, phase: str) -> float:
        """Seconds of a phase of this step so far."""
        return self._phases[phase]

    def end_step(self) -> None:
        """What passed since the last mark was training."""
        self.mark("training")
        self.add(self._phases, self._lengths)
        self.begin()

    def add(self, seconds: dict[str, float], lengths: Sequence[int]) -> None:
        """A step whose phases are known; its peak is that of the process so far."""
        self.steps.append({**seconds, "lengths": list(lengths), "peak_mib": self.peak_mib()})

    def peak_mib(self) -> float:
        """Above the level after the imports; on a GPU, what torch had allocated there."""
        if self.device != "cpu":
            import torch

            return torch.cuda.max_memory_allocated() / 2**20
        return status_mib("VmHWM") - self.imported_mib

    def report(self, *packages: str) -> None:
        """The last line of output is what the other process reads. The first step does not count."""
        steps = self.steps[1:]
        peak = steps[-1].pop("peak_mib")
        for step in steps:
            step.pop("peak_mib", None)
        versions = {package: version(package) for package in packages}
        print("\n" + json.dumps({"steps": steps, "peak_mib": peak, "versions": versions}), flush=True)
