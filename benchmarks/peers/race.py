"""A race to a score: what a side is given, and when it is there. No side's own code.

Imported under every side's versions, so it needs the standard library alone.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

WINDOW = 3
"""The target is reached where the mean score of so many steps in a row is at least that."""


@dataclass(frozen=True)
class Settings:
    """What each side may choose for itself."""

    batch: int
    minibatch: int
    epochs: int
    policy_rate: float
    value_rate: float
    """TRL has one optimizer, and so one learning rate for both."""

    def __str__(self) -> str:
        rates = {f"{rate:g}": None for rate in (self.policy_rate, self.value_rate)}
        return f"{self.batch} by {self.minibatch}, epochs {self.epochs}, lr {' and '.join(rates)}"


@dataclass(frozen=True)
class Race:
    """What one side does in one process."""

    policy: str
    """Folder of the model that both start from, with its tokenizer."""
    reward: str | None
    """Folder of the reward model, which the value model starts from; None: the digits of the prompt in order are
    right, which `sorting.py` judges, and the value model starts from the policy."""
    prompts: str
    """File with texts of prompts, as JSON."""
    settings: Settings
    new_tokens: int
    kl_coefficient: float
    target: float
    max_steps: int
    seed: int = 0
    threads: int = 1
    algorithm: str = "ppo"
    """What Proximo has beside PPO with a value model: `trunk` is PPO with a value head on the policy, and
    `reinforce++` has no critic."""

    def texts(self) -> list[str]:
        """Of the prompts."""
        return json.loads(Path(self.prompts).read_text())

    def save(self, path: Path) -> Path:
        """Write it where a process reads it."""
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def load(cls, path: str) -> "Race":
        """As it was saved."""
        found = json.loads(Path(path).read_text())
        return cls(**found | {"settings": Settings(**found["settings"])})


def arrival(scores: Sequence[float], target: float) -> int | None:
    """The index of the step that ends the first window with a mean of at least `target`."""
    ends = range(WINDOW, len(scores) + 1)
    return next((end - 1 for end in ends if statistics.mean(scores[end - WINDOW : end]) >= target), None)


class Course:
    """Notes the steps of a side, from the start of its first, with models loaded and nothing run."""

    def __init__(self, race: Race) -> None:
        self.race = race
        self.steps: list[dict[str, float]] = []
        self._start, self._cpu_start = 0.0, 0.0

    def begin(self) -> None:
        """Time begins to count here."""
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def note(self, *, score: float, kl: float) -> bool:
        """A step with its mean score and KL in nats per response is over. True: no more are needed."""
        seconds, cpu_seconds = time.perf_counter() - self._start, time.process_time() - self._cpu_start
        self.steps.append({"seconds": seconds, "cpu_seconds": cpu_seconds, "score": score, "kl": kl})
        there = arrival([step["score"] for step in self.steps], self.race.target) is not None
        return there or len(self.steps) >= self.race.max_steps

    def report(self, *packages: str) -> None:
        """The last line of output is what the other process reads."""
        found: dict[str, Any] = {"steps": self.steps, "versions": {package: version(package) for package in packages}}
        print("\n" + json.dumps(found), flush=True)
