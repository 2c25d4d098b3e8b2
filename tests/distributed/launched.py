"""Starts a command on two ranks for tests, with a fault in one of them, and keeps what it printed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tiny_runs import Kind, changed, make_inputs, recipe_of

TESTS = Path(__file__).parents[1]
LAUNCH = (
    "import sys; from proximo.distributed.launch import launch; "
    "sys.exit(launch([sys.executable, *sys.argv[2:]], num=int(sys.argv[1])))"
)
LAUNCHED = [sys.executable, "-c", LAUNCH, "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
MOST_SECONDS = 900
"""One attempt takes less, also on a busy machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """What a command left."""

    status: int
    output: str
    run: Path

    @property
    def errors(self) -> list[str]:
        """The messages; one is wanted."""
        return [line for line in self.output.splitlines() if line.startswith("error: ")]

    @property
    def faults(self) -> list[str]:
        """The notes of `faulty_rank.py`."""
        return [line for line in self.output.splitlines() if line.startswith("fault: ")]

    @property
    def outcome(self) -> dict[str, Any]:
        return json.loads((self.run / "outcome.json").read_bytes())


def sft_recipe(place: Path, **devices: Any) -> Path:
    """A recipe of five steps on a replicated model."""
    make_inputs(place)
    settings = {"shard": "replicate", **devices}
    recipe = changed(recipe_of("sft", place), {f"devices.{name}": value for name, value in settings.items()})
    return write_recipe("sft", recipe, place)


def write_recipe(kind: Kind, recipe: Mapping[str, Any], place: Path) -> Path:
    """The recipe as a file with the name of its command."""
    path = place / f"{kind}.yaml"
    path.write_text(yaml.safe_dump(dict(recipe), sort_keys=False), encoding="utf-8")
    return path


def rank_command(recipe: Path, faults: Sequence[Mapping[str, Any]], *arguments: str) -> list[str]:
    """What each rank runs."""
    return [str(TESTS / "distributed" / "faulty_rank.py"), json.dumps(faults), recipe.stem, str(recipe), *arguments]


def start(command: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])}
    return subprocess.Popen(
        command,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], recipe: Path, *, attempts: int = 1) -> Ended:
    try:
        output, _ = process.communicate(timeout=attempts * MOST_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Ended(status=process.returncode, output=output, run=recipe.parent / "run")


def launched(recipe: Path, fault: Mapping[str, Any], *arguments: str) -> Ended:
    """Run the command on ranks that its parent starts, as `proximo sft` does."""
    return end(start([*LAUNCHED, *rank_command(recipe, [fault] if fault else [], *arguments)]), recipe)


def torchrun(recipe: Path, faults: Sequence[Mapping[str, Any]]) -> Ended:
    """Run the command under torchrun, which starts it again after each fault."""
    command = [*TORCHRUN, f"--max-restarts={len(faults)}", *rank_command(recipe, faults, "--resume=auto")]
    return end(start(command), recipe, attempts=len(faults) + 1)


def wait_for_lines(run: Path, count: int) -> None:
    """Wait until that many steps are in the log."""
    metrics = run / "metrics.jsonl"
    give_up = time.monotonic() + MOST_SECONDS
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= count):
        assert time.monotonic() < give_up, f"{metrics} did not come to {count} lines"
        time.sleep(0.05)
