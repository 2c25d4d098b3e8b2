"""What every section of the check is given: the device, its time and memory, processes, and a list of what is wrong."""

import gc
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
SMOKE_SECONDS = 3000.0
"""A limit that no smoke run comes near."""


class TooLong(BaseException):
    """A section ran past its limit. No `except Exception` in it may keep it going."""


class CannotRun(Exception):  # noqa: N818
    """The section has nothing to do here; the reason. It is skipped, and has not failed."""


@dataclass(kw_only=True)
class Bench:
    """One run of the check."""

    device: str
    work: Path
    """An empty folder for models and runs."""
    smoke: bool = False
    """Tiny sizes, and no limit of time."""
    budget: float = 440.0
    """Seconds for all sections."""
    start: float = field(default_factory=time.time)
    section_end: float = 0.0
    """When the section that runs now is cut."""
    rates: dict[str, float] = field(default_factory=dict)
    """Of this device: `bytes_per_second` of a copy, operations per second of products in `bf16` and `float32`."""
    wrong: list[str] = field(default_factory=list)
    """Of the section that runs now."""
    skipped: list[str] = field(default_factory=list)
    """Parts of the section that runs now, with the reasons."""
    measured_gib: dict[str, float | None] = field(default_factory=dict)
    """Size of the model -> peak of its training."""
    kept: Any = None
    """Trainer and prompts of `training_speed`, for `training_profile`."""

    @property
    def is_cuda(self) -> bool:
        """Whether kernels run beside the host."""
        return self.device.startswith("cuda")

    def left(self) -> float:
        """Seconds of the budget."""
        return SMOKE_SECONDS if self.smoke else self.budget - (time.time() - self.start)

    def section_left(self) -> float:
        """Seconds of the section that runs now."""
        return SMOKE_SECONDS if self.smoke else max(1.0, self.section_end - time.time())

    def hold(self, condition: bool, said: str) -> None:
        """The section fails with these words where the condition is false, and goes on."""
        if not condition:
            self.wrong.append(said)

    def case(self, name: Mapping[str, Any], work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """A row: the name and what the work found, or its traceback. The section has then failed, and goes on."""
        try:
            return {**name, **work()}
        except Exception as error:
            self.wrong.append(f"{'-'.join(map(str, name.values()))}: {type(error).__name__}: {error}"[:300])
            return {**name, "failed": traceback.format_exc()[-1500:]}

    def synchronise(self) -> None:
        """Wait until the device has done what it was told."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give back what no tensor needs, and let the peak begin anew."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        """What torch had allocated at most since `free`; None on a CPU."""
        return round(torch.cuda.max_memory_allocated() / 2**30, 3) if self.is_cuda else None

    def seconds(self, work: Callable[[], Any]) -> float:
        """Of one call."""
        self.synchronise()
        begin = time.perf_counter()
        work()
        self.synchronise()
        return time.perf_counter() - begin

    def median_seconds(self, work: Callable[[], Any], *, repeats: int = 3) -> float:
        """Of so many calls, after one that does not count."""
        work()
        return statistics.median(self.seconds(work) for _ in range(repeats))

    def process(self, command: Sequence[str | Path], *, seconds: float) -> dict[str, Any]:
        """Exit status, seconds and output of a process in the project's root; 124 where it was killed at the limit.

        The limit is also that of the section.
        """
        begin = time.time()
        merged: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": ROOT}
        try:
            done = subprocess.run(
                [str(part) for part in command],
                check=False,
                timeout=SMOKE_SECONDS if self.smoke else min(seconds, self.section_left() - 2),
                env=environment(),
                **merged,
            )
            status, said = done.returncode, done.stdout
        except subprocess.TimeoutExpired as late:
            status, said = 124, late.stdout or b""
        return {"status": status, "seconds": round(time.time() - begin, 1), "said": said.decode("utf8", "replace")}

    def proximo(self, *arguments: str | Path, seconds: float) -> dict[str, Any]:
        """The command, as `process`."""
        return self.process([sys.executable, "-m", "proximo", *arguments], seconds=seconds)


def environment() -> dict[str, str]:
    """Of processes: this tree's sources, and its peers' scripts, come first."""
    paths = [ROOT / "src", ROOT / "benchmarks" / "peers", os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path))}


def brief(done: Mapping[str, Any]) -> dict[str, Any]:
    """What is worth keeping of a process: the end of its output where it failed."""
    row = {"status": done["status"], "seconds": done["seconds"]}
    return row if done["status"] == 0 else {**row, "said": done["said"][-1200:]}
