"""The loop around a trainer: one line per step, saves, resumes with the same bits, whatever interrupts it."""

import json
import shutil
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from proximo.checkpoint.ranks import Writer
from proximo.checkpoint.reading import Checkpoint
from proximo.distributed.world import World, using
from proximo.errors import DataError, RunFolderError, TrainingError
from proximo.kernels import kernels_of
from proximo.metrics.report.page import write_report
from proximo.metrics.values import Mean
from proximo.ppo.recipe import PPORecipe
from proximo.run import journal, loop
from proximo.run.loop import run_task
from proximo.run.options import RunOptions
from proximo.run.task import Record
from proximo.supervised.sft_recipe import SFTRecipe


class Counting:
    """A trainer whose only weight is a number that each step changes."""

    device = "cpu"
    notes = ()
    best_metric = "evaluation/loss"
    best_is_lowest = True
    held_out: tuple[str, ...] = ("a row",)

    def __init__(
        self,
        num_steps: int = 5,
        *,
        data: str = "rows",
        fail_at: int | None = None,
        fails: BaseException | None = None,
    ) -> None:
        self.num_steps = num_steps
        self.inputs_fingerprint: Mapping[str, Any] = {"rows": data}
        self.weight = 0.0
        self.fail_at = 1 if fails and fail_at is None else fail_at
        self.fails = fails or KeyboardInterrupt()

    def step(self, step: int) -> Record:
        if step == self.fail_at:
            raise self.fails
        self.weight = self.weight * 0.5 + step
        return Record(metrics={"sft/loss": Mean(self.weight, 1)}, samples=[{"kind": "train", "text": f"{self.weight}"}])

    def evaluate(self) -> Record | None:
        return Record(metrics={"evaluation/loss": Mean(abs(self.weight - 4), 1)})

    def writers(self) -> Mapping[str, Writer]:
        return {"weight.txt": lambda path: path.write_text(repr(self.weight)) and None}

    def state(self) -> Mapping[str, Any]:
        return {"updates": {}}

    def close(self) -> None:
        pass

    def restore(self, checkpoint: Checkpoint) -> None:
        self.weight = float(checkpoint.path("weight.txt").read_text())


@pytest.fixture(autouse=True)
def kernels_or_none(no_report: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether this machine can have them is no matter of these tests."""
    monkeypatch.setattr(type(kernels_of("cpu")), "why_missing", lambda _: None)


def recipe(folder: Path, **run: Any) -> SFTRecipe:
    return SFTRecipe(
        run={"folder": str(folder), "save_every_steps": 2, "evaluate_every_steps": 2, **run},
        model={"path": "m"},
        data={"sources": [{"path": "d.jsonl"}]},
    )


def start(folder: Path, task: Counting | None = None, *, run: dict[str, Any] | None = None, **options: Any) -> int:
    made = recipe(folder, **(run or {}))
    return run_task(lambda: task or Counting(), made, RunOptions(**{"quiet": True, **options}))


def lines(path: Path) -> list[dict[str, Any]]:
    """Without times, which no run repeats."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in record.items() if not name.startswith("time/")} for record in records]


def test_a_run_writes_one_line_per_step_and_one_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "write_report", write_report)
    assert start(tmp_path / "run") == 0
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4, 5]
    assert [line["step"] for line in metrics if "evaluation/loss" in line] == [0, 2, 4, 5]
    assert [line["step"] for line in lines(tmp_path / "run" / "samples.jsonl")] == [1, 2, 3, 4, 5]
    assert (tmp_path / "run" / "report.html").exists()
    assert json.loads((tmp_path / "run" / "config.resolved.json").read_text())["run"]["save_every_steps"] == 2


def test_a_run_with_nothing_held_out_says_nothing_of_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Counting()
    task.held_out = ()
    start(tmp_path, task, quiet=False)
    assert "evaluation" not in (tmp_path / "log.txt").read_text()
    assert "step 0/" not in (said := capsys.readouterr().err)
    assert "step 1/5: training" in said
    assert "evaluation/loss" not in lines(tmp_path / "metrics.jsonl")[-1]


def test_a_run_on_a_cpu_without_kernels_keeps_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(kernels_of("cpu")), "why_missing", lambda _: "no kernels in C: there is no compiler")
    elsewhere = Counting()
    elsewhere.device = "meta"
    for name, task, said in (("cpu", None, 1), ("meta", elsewhere, 0)):
        assert start(tmp_path / name, task) == 0
        log = (tmp_path / name / "log.txt").read_text()
        assert log.splitlines().count("no kernels in C: there is no compiler") == said


def test_an_interrupted_run_ends_with_the_same_lines_and_weight(tmp_path: Path) -> None:
    start(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "cut", Counting(fail_at=4))
    assert [line["step"] for line in lines(tmp_path / "cut" / "metrics.jsonl")] == [0, 1, 2, 3]
    resumed = Counting()
    assert start(tmp_path / "cut", resumed, resume="must") == 0
    assert resumed.weight == 8.0625
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert lines(tmp_path / "cut" / name) == lines(tmp_path / "whole" / name)


def test_a_mistake_in_the_data_loses_nothing_of_the_run_that_was_to_be_replaced(tmp_path: Path) -> None:
    start(tmp_path / "run")

    def broken() -> Counting:
        raise DataError("no rows")

    made = recipe(tmp_path / "run")
    with pytest.raises(DataError):
        run_task(broken, made, RunOptions(quiet=True, overwrite=True))
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 6


def test_a_resume_with_other_data_names_what_differs(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", Counting(fail_at=4))
    with pytest.raises(RunFolderError, match="rows"):
        start(tmp_path / "run", Counting(data="other"), resume="must")


def test_a_resume_with_other_settings_or_ranks_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    """Models that take minutes to load, for example."""
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", Counting(fail_at=4))

    def slow() -> Counting:
        raise AssertionError("it was built")

    options = RunOptions(quiet=True, resume="auto")
    with pytest.raises(RunFolderError, match=r"run.seed: 0 -> 7"):
        run_task(slow, recipe(tmp_path / "run", seed=7), options)
    world = World()
    world.size = 2
    with using(world), pytest.raises(RunFolderError, match=r"num_ranks: 1 -> 2"):
        run_task(slow, recipe(tmp_path / "run"), options)


def test_a_resume_with_other_threads_needs_permission_and_is_noted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", Counting(fail_at=4))
    torch.set_num_threads(2)
    with pytest.raises(RunFolderError, match="num_threads"):
        start(tmp_path / "run", resume="must")
    assert start(tmp_path / "run", resume="must", allow_different_environment=True) == 0
    assert "resumed in another environment: num_threads: 1 -> 2\n" in (tmp_path / "run" / "log.txt").read_text()


def delete_the_second_line(path: Path) -> None:
    first, _, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, *others]))


@pytest.mark.parametrize("change", [delete_the_second_line, Path.unlink], ids=lambda change: change.__name__)
@pytest.mark.parametrize(("name", "had"), [("metrics.jsonl", 5), ("samples.jsonl", 4)])
def test_a_log_that_was_cut_is_told_and_the_training_goes_on(tmp_path: Path, change: Any, name: str, had: int) -> None:
    start(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step-000004\n")
    change(tmp_path / "run" / name)
    resumed = Counting()
    assert start(tmp_path / "run", resumed, resume="must") == 0
    assert resumed.weight == 8.0625
    found = 0 if change is Path.unlink else had - 1
    told = f"{name} has {found} lines up to step 4, and had {had} when the checkpoint was saved"
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count(told) == 1
    assert log.count("when the checkpoint was saved") == 1


def scoring(folder: Path, text: str) -> None:
    (folder / "own_scoring.py").write_text(text)


def test_another_source_of_a_reward_function_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    scoring(tmp_path, "def score(prompts, responses, metadata): return [0.0 for _ in responses]")
    given = {"reward": [{"kind": "function", "function": "own_scoring:score"}], "model": {"path": "m"}}
    made = PPORecipe.model_validate(
        {
            **given,
            "run": recipe(tmp_path / "run").run.model_dump(),
            "data": {"sources": [{"path": "d.jsonl"}]},
            "ppo": {"num_steps": 5, "prompts_per_step": 1, "rollout": {"max_new_tokens": 1}},
        }
    )

    def go(task: Counting, **options: Any) -> int:
        return run_task(lambda: task, made, RunOptions(**{"quiet": True, **options}))

    with pytest.raises(KeyboardInterrupt):
        go(Counting(fail_at=4))
    scoring(tmp_path, "def score(prompts, responses, metadata): return [1.0 for _ in responses]")
    hashed = '"source with sha256 [0-9a-f]{16}"'
    named = rf"rewards .*\n  own_scoring:score: {hashed} -> {hashed}\n.*--allow-changed-rewards"
    for permitted in ({}, {"allow_different_environment": True}):
        with pytest.raises(RunFolderError, match=named):
            run_task(lambda: pytest.fail("it was built"), made, RunOptions(quiet=True, resume="must", **permitted))
    assert go(Counting(), resume="must", allow_changed_rewards=True) == 0
    assert "resumed with changed rewards: own_scoring:score: " in (tmp_path / "run" / "log.txt").read_text()


def test_the_plain_lines_of_every_process_stay_in_the_log(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", Counting(fail_at=4))
    start(tmp_path / "run", resume="must")
    log = (tmp_path / "run" / "log.txt").read_text().splitlines()
    steps = [line.split()[1] for line in log if line.startswith("step ")]
    assert steps == ["0/5", "1/5", "2/5", "3/5", "3/5", "4/5", "5/5"]
    assert [line for line in log if line.startswith("finished: 5 steps")]
    start(tmp_path / "run", overwrite=True)
    log = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert [line.split()[0] for line in log if line.startswith(("step ", "finished"))] == ["step"] * 6 + ["finished:"]


def test_what_ended_a_run_stands_in_its_log_and_on_top_of_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "write_report", write_report)
    task = Counting()
    task.step = lambda step: 1 // 0
    with pytest.raises(ZeroDivisionError):
        start(tmp_path / "run", task)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "Traceback" in log
    assert "ZeroDivisionError: integer division or modulo by zero\n" in log
    assert f"failed, report in {tmp_path}/run/report.html" in log
    page = (tmp_path / "run" / "report.html").read_text()
    reason = page.index("ZeroDivisionError: integer division or modulo by zero")
    assert reason < page.index("<main>")
    assert "failed before the first step" in page


def test_a_report_that_cannot_be_written_hides_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> Path:
        raise OSError("the disk is full")

    monkeypatch.setattr(journal, "write_report", refuse)
    with pytest.raises(ZeroDivisionError):
        start(tmp_path / "run", Counting(fails=ZeroDivisionError()))


def test_how_a_run_ended_is_kept_until_it_goes_on(tmp_path: Path) -> None:
    def outcome() -> dict[str, Any]:
        return json.loads((tmp_path / "run" / "outcome.json").read_text())

    with pytest.raises(TrainingError):
        start(tmp_path / "run", Counting(fail_at=4, fails=TrainingError("the judge\n  is gone")))
    assert outcome() == {"state": "failed", "total_steps": 5, "reason": "the judge is gone"}
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", Counting(fail_at=4), resume="must")
    assert not (tmp_path / "run" / "outcome.json").exists()
    start(tmp_path / "run", resume="must")
    assert outcome() == {"state": "finished", "total_steps": 5, "reason": None}
    start(tmp_path / "run", resume="auto")
    assert outcome()["state"] == "finished"


def test_an_alarm_is_said_once_when_it_comes_and_again_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Counting(num_steps=12)
    task.step = lambda step: Record(metrics={"sft/loss": Mean(9.0 if step > 6 else 1.0, 1)})
    start(tmp_path / "run", task)
    told = [line for line in capsys.readouterr().err.splitlines() if "jumped" in line]
    assert [line.partition(":")[0] for line in told] == ["warning"]
    assert "step 8, problem: The training loss jumped. It rose from 1.00 to 9.00 at step 7," in told[0]
    log = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in log if "jumped" in line] == ["warning", "problem"]
    assert log.index(told[0]) < next(place for place, line in enumerate(log) if line.startswith("step 9/12"))


def failed_cpu_allocation() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    return caught.value


@pytest.mark.parametrize(
    ("error", "phase", "step"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "training", 1),
        (MemoryError(), "evaluation", 0),
        (failed_cpu_allocation(), "training", 1),
    ],
    ids=repr,
)
def test_where_memory_runs_out_the_settings_to_lower_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, phase: str, step: int
) -> None:
    def fail(*given: Any) -> Record:
        raise error

    task = Counting()
    monkeypatch.setattr(task, {"training": "step", "evaluation": "evaluate"}[phase], fail)
    wanted = rf"step {step}: memory ran out in {phase}; lower sft.tokens_per_microbatch.*`proximo plan` with"
    with pytest.raises(TrainingError, match=wanted):
        start(tmp_path / "run", task)


def test_resuming_a_finished_run_is_an_error_unless_auto(tmp_path: Path) -> None:
    start(tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match="would train nothing"):
        start(tmp_path / "run", resume="must")
    assert start(tmp_path / "run", resume="auto") == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    with pytest.raises(RunFolderError, match="is at step 5, beyond the 4 steps of the recipe"):
        start(tmp_path / "run", Counting(num_steps=4), resume="must")


def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path: Path) -> None:
    start(tmp_path / "run", Counting(num_steps=8), run={"keep_last": 2, "save_every_steps": 1})
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept == ["step-000002", "step-000007", "step-000008"]


@pytest.mark.parametrize(("steps", "saved"), [(None, [3, 6, 8]), (5, [3, 5, 8])])
def test_a_run_saves_when_minutes_have_passed_since_its_last_save(
    steps: int | None, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever caused that one: without the save of step 5, the next would be due after step 7."""
    seconds = count(0, 20)
    clock = SimpleNamespace(monotonic=lambda: next(seconds), perf_counter=time.perf_counter)
    monkeypatch.setattr(loop, "time", clock)
    run = {"save_every_steps": steps, "save_every_minutes": 1.0, "keep_last": 9}
    start(tmp_path / "run", Counting(num_steps=8), run=run)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept == [f"step-{step:06d}" for step in saved]


def test_overwriting_moves_the_earlier_run_aside_and_says_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    earlier = contents(tmp_path / "run")
    aside = tmp_path / "run.replaced-1"
    with pytest.raises(RuntimeError, match="the reward function"):
        start(tmp_path / "run", Counting(fails=RuntimeError("the reward function")), overwrite=True, quiet=False)
    assert f"the run that was in {tmp_path / 'run'} is now in {aside}\n" in capsys.readouterr().err
    assert contents(aside) == earlier
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", Counting(fail_at=2), overwrite=True)
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 2
    assert not (tmp_path / "run" / "checkpoints").exists()
    shutil.move(tmp_path / "run", tmp_path / "other")
    shutil.move(aside, tmp_path / "run")
    assert start(tmp_path / "run", resume="auto") == 0
    assert contents(aside.with_name("run")) == earlier


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a run folder, but for its lock."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name != ".proximo-run"}
