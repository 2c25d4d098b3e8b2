"""What each step of a TRL trainer took and reached, written after each, so that a run can be stopped."""

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stopwatch import status_mib
from transformers import TrainerCallback


class StepLog(TrainerCallback):
    """Seconds and peak memory of each step, and what the trainer logs of it."""

    def __init__(self, out: str, **names: str) -> None:
        """`names`: what is kept -> its name in the trainer's log."""
        self._out, self._names = Path(out), names
        self._steps: list[dict[str, float]] = []
        self._start = 0.0

    def on_train_begin(self, *_, **__) -> None:
        """The first step begins."""
        self._start = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_) -> None:
        """Once, at the end of a step, and at the end of all."""
        del args, state, control
        if not logs.keys() >= set(self._names.values()):
            return
        now = time.perf_counter()
        measured = {"seconds": round(now - self._start, 1), "peak_mib": round(status_mib("VmHWM"))}
        self._start = now
        self._steps.append({**measured, **{name: logs[key] for name, key in self._names.items()}})
        print(self._steps[-1], flush=True)
        written = {"steps": self._steps, "trl": version("trl")}
        self._out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
