"""A program that runs command lines of Proximo in child processes and kills them. Not which, nor when: it is told.

One job per line of standard input, one report per line of standard output, both JSON. A child is a fork of this
process, which has imported everything and computed nothing; it dies by a real SIGKILL, from within at an exact place,
or from outside at a moment of the clock. The package has no hook for this: its functions are replaced in the child.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, Never

from checkpoint_faults import FaultyDisk

import proximo.ppo.from_recipe
from distributed.ranks import PRELOADED
from proximo.checkpoint.logs import JsonLines
from proximo.checkpoint.store import CheckpointStore
from proximo.cli import main as proximo
from proximo.environments.players.pool import EnvironmentPool
from proximo.ppo.task import PPOTask
from proximo.run import journal
from proximo.supervised.reward_trainer import RewardTask
from proximo.supervised.sft_trainer import SFTTask

LONGEST_LIFE_SECONDS = 400


class Death:
    """Kills this process where the job says, and leaves a note of where that was."""

    def __init__(self, note: Path) -> None:
        self.note = note
        self.step = 0
        self.phase = "before the first step"
        self._watch_steps()

    def at_call(self, *, step: int, number: int) -> None:
        """In the `step`-th step of this life or later, `number` calls of any function after that step began."""
        left = number

        def count(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal left
            if event in ("call", "c_call"):
                left -= 1
                if left < 0:
                    self._die(f"at a call in {frame.f_code.co_qualname}")

        self._on_step(step, lambda: sys.setprofile(count))

    def at_effect(self, *, save: int, effect: int, moment: str) -> None:
        """In the `save`-th save of this life, before, within or after its effect number `effect`, from 0."""
        disk = FaultyDisk(setattr, stop=lambda: self._die(f"{moment} {disk.effects[-1]}"))
        really, saves = CheckpointStore.save, 0

        def saving(store: CheckpointStore, *given: Any, **named: Any) -> Any:
            nonlocal saves
            saves += 1
            self.phase = "save"
            if saves == save:
                disk.watch(store.folder, stop_at=effect, moment=moment)
            return really(store, *given, **named)

        CheckpointStore.save = saving

    def at_line(self, *, line: int, moment: str) -> None:
        """When the `line`-th line of this life in metrics.jsonl is half written ("torn"), or just written ("after")."""
        really, lines = JsonLines.append, 0

        def append(log: JsonLines, record: dict[str, Any]) -> None:
            nonlocal lines
            lines += Path(log._file.name).name == "metrics.jsonl"
            if lines == line and moment == "torn":
                log._file.write(b'{"step": ')
                log._file.flush()
                self._die("within a line of metrics.jsonl")
            really(log, record)
            if lines == line:
                self._die("after a line of metrics.jsonl, before any save")

        JsonLines.append = append

    def at_turn(self, *, turn: int) -> None:
        """When an environment is given the `turn`-th text of this life, while others are in flight."""
        really, turns = EnvironmentPool.step, 0

        def step(pool: EnvironmentPool, lane: int, text: str) -> None:
            nonlocal turns
            turns += 1
            really(pool, lane, text)
            if turns == turn:
                self._die(f"with {len(pool._lanes)} environments in flight")

        EnvironmentPool.step = step

    def _die(self, where: str) -> Never:
        sys.setprofile(None)
        self.note.write_text(f"step {self.step}, {self.phase}: {where}")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")

    def _watch_steps(self) -> None:
        for task in (SFTTask, RewardTask, PPOTask):
            task.step = self._noting(task.step, "training")
            task.evaluate = self._noting(task.evaluate, "evaluation")

    def _noting(self, really: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(task: Any, *given: int) -> Any:
            self.step = given[0] if given else self.step
            self.phase = phase
            result = really(task, *given)
            self.phase = f"after {phase}"
            return result

        return call

    def _on_step(self, step: int, do: Callable[[], None]) -> None:
        """At the beginning of the `step`-th step of this life."""
        begun = 0

        def wrap(really: Callable[..., Any]) -> Callable[..., Any]:
            def call(task: Any, *given: int) -> Any:
                nonlocal begun
                begun += 1
                if begun == step:
                    do()
                return really(task, *given)

            return call

        for task in (SFTTask, RewardTask, PPOTask):
            task.step = wrap(task.step)


def child(job: dict[str, Any]) -> Never:
    """Run the command line to its end or its death."""
    signal.alarm(LONGEST_LIFE_SECONDS)
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    journal.write_report = lambda folder: folder / "report.html"  # slow, and nothing is read back from it
    kill = dict(job["kill"] or {"at": None})
    death = Death(Path(job["note"]))
    match kill.pop("at"):
        case "call":
            death.at_call(**kill)
        case "effect":
            death.at_effect(**kill)
        case "line":
            death.at_line(**kill)
        case "turn":
            death.at_turn(**kill)
    try:
        status = proximo(job["argv"])
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def kill_by_the_clock(process: int, job: dict[str, Any]) -> None:
    """SIGKILL from outside: `seconds` after metrics.jsonl has `lines` lines more than at the start of this life."""
    log, kill = Path(job["folder"]) / "metrics.jsonl", job["kill"]
    size = log.stat().st_size if log.exists() else 0
    seen = 0
    while seen < kill["lines"] and not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.002)
        now = log.stat().st_size if log.exists() else 0
        seen += now > size  # a growth is at least one line; a resume may first have cut the file back
        size = now
    time.sleep(kill["seconds"])
    os.kill(process, signal.SIGKILL)
    *_, last = log.read_text().splitlines()
    Path(job["note"]).write_text(f"by the clock, {kill['seconds']:.3f} s after a line; then the last was {last[:12]}")


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One life: its exit status (negative: the signal that ended it), and where it was killed."""
    Path(job["note"]).unlink(missing_ok=True)
    process = os.fork()
    if process == 0:
        child(job)
    if job["kill"] and job["kill"]["at"] == "clock":
        kill_by_the_clock(process, job)
    _, status = os.waitpid(process, 0)
    note = Path(job["note"])
    return {"status": os.waitstatus_to_exitcode(status), "where": note.read_text() if note.exists() else ""}


if __name__ == "__main__":
    for module in PRELOADED:
        import_module(module)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
    os._exit(0)  # an orderly end of all that was imported takes seconds
