"""How a run ends that a guard stops, or a signal in its last step: what is saved, what is said, and what can go on."""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_loop import Counting, start

from proximo.errors import GuardError, TrainingError
from proximo.kernels import kernels_of
from proximo.run import loop
from proximo.run.task import Record
from tiny_runs import changed, make_inputs, recipe_of, run

LOUD = {"quiet": False}


@pytest.fixture(autouse=True)
def kernels_or_none(no_report: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(kernels_of("cpu")), "why_missing", lambda _: None)


class Guarded(Counting):
    """A guard ends it in step 8: before the step has changed anything, after it, or in the evaluation after it."""

    def __init__(self, when: str) -> None:
        super().__init__(num_steps=9)
        self.when = when
        self.now = 0

    def step(self, step: int) -> Record:
        self.now = step
        if step == 8 and self.when == "before":
            raise GuardError("the verifier is down")
        record = super().step(step)
        guard = "the verifier is down" if step == 8 and self.when == "after" else None
        return Record(metrics=record.metrics, samples=record.samples, guard=guard)

    def evaluate(self) -> Record | None:
        if self.now == 8 and self.when == "in the evaluation":
            raise GuardError("the verifier is down")
        return super().evaluate()


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("when", "saved"), [("before", 7), ("after", 8), ("in the evaluation", 8)])
def test_a_guard_that_ends_a_run_saves_first_and_removes_no_checkpoint(tmp_path: Path, when: str, saved: int) -> None:
    folder, rarely = tmp_path / "run", {"save_every_steps": 3, "keep_last": 2}
    with pytest.raises(TrainingError, match="the verifier is down"):
        start(folder, Guarded(when), run=rarely)
    assert (folder / "checkpoints" / "latest").read_text() == f"step-00000{saved}\n"
    assert (folder / "checkpoints" / "step-000003" / "manifest.json").is_file()
    assert steps(folder / "metrics.jsonl") == list(range(saved + 1))
    assert f"saved after step {saved}\n" in (folder / "log.txt").read_text()
    ended = json.loads((folder / "outcome.json").read_text())
    assert (ended["state"], ended["reason"]) == ("failed", "the verifier is down")

    whole, resumed = Counting(num_steps=9), Counting(num_steps=9)
    start(tmp_path / "whole", whole, run=rarely)
    assert start(folder, resumed, run=rarely, resume="must") == 0
    assert resumed.weight == whole.weight
    assert not (folder / "checkpoints" / "step-000003").exists(), "the next save removes it"


def test_a_guard_in_the_first_step_has_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="at once"):
        start(tmp_path / "run", Counting(fails=GuardError("at once")))
    assert not (tmp_path / "run" / "checkpoints" / "latest").exists()
    assert "saved after" not in (tmp_path / "run" / "log.txt").read_text()


def always_one(prompts: Sequence[Any], responses: Sequence[Any], metadata: Sequence[Any]) -> list[float]:
    return [1.0 for _ in responses]


def test_the_advice_of_a_guard_can_be_followed(tmp_path: Path) -> None:
    """Nothing was saved before, and the key that it names may change on resume."""
    place = make_inputs(tmp_path)
    dead = {"reward": [{"kind": "function", "function": "test_endings:always_one"}], "value.init_from": "policy"}
    recipe = changed(recipe_of("ppo", place), {**dead, "run.save_every_steps": 100})
    with pytest.raises(TrainingError, match=r"--resume with ppo\.guards\.max_constant_reward_steps=null goes on"):
        run("ppo", changed(recipe, {"ppo.guards.max_constant_reward_steps": 3}), options())
    assert (place / "run" / "checkpoints" / "latest").read_text() == "step-000002\n"
    assert run("ppo", recipe, options(resume="must")) == 0
    assert steps(place / "run" / "metrics.jsonl") == [0, 1, 2, 3, 4, 5]


def options(**given: Any) -> loop.RunOptions:
    return loop.RunOptions(quiet=True, **given)


class Signalled(Counting):
    """A SIGTERM comes within a step."""

    def __init__(self, at: int) -> None:
        super().__init__(num_steps=3)
        self.at = at

    def step(self, step: int) -> Record:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(step)


def ended(folder: Path) -> Mapping[str, Any]:
    return json.loads((folder / "outcome.json").read_text())


def test_a_signal_in_the_last_step_finds_the_run_complete(tmp_path: Path) -> None:
    assert start(tmp_path / "run", Signalled(3)) == 0
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "continue with --resume" not in log
    assert "the signal came in step 3, the last one: nothing is left to do\nfinished: 3 steps" in log
    assert ended(tmp_path / "run")["state"] == "finished"


def test_a_signal_before_the_last_step_stops_the_run(tmp_path: Path) -> None:
    assert start(tmp_path / "run", Signalled(2)) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step 2; continue with --resume" in (tmp_path / "run" / "log.txt").read_text()
    assert ended(tmp_path / "run") == {"state": "stopped", "total_steps": 3, "reason": "SIGTERM"}


def test_a_signal_in_the_last_step_of_a_stage_keeps_the_next_stage_from_starting(tmp_path: Path) -> None:
    assert start(tmp_path / "run", Signalled(3), more_follows=True) == 128 + signal.SIGTERM
    assert ended(tmp_path / "run")["state"] == "finished"
