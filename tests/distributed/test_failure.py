"""A rank that fails, dies or does not answer ends the run of all, soon, with one message that names it."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from launched import (
    LAUNCHED,
    MOST_SECONDS,
    TORCHRUN,
    end,
    launched,
    rank_command,
    sft_recipe,
    start,
    torchrun,
    wait_for_lines,
    write_recipe,
)

from distributed.ranks import SOON_SECONDS, Ranks
from proximo.distributed.heartbeats import DeadlineStore, Position, Watch
from proximo.distributed.process_group import ProcessGroupWorld
from proximo.distributed.world import World
from proximo.errors import RankError, TrainingError
from proximo.run.options import RunOptions
from run_outcomes import assert_same_outcome, outcome, read_lines
from tiny_runs import NUM_STEPS, changed, make_inputs, recipe_of, run

MOST_CALLS = 100_000
"""Of functions, in a step and what follows it: fewer than there are."""
MOST_EFFECTS = (25, 8)
"""On the file system, in a save, of rank 0 and of rank 1: fewer than there are."""
RANK_1 = r"error: rank 1 \(process \d+ on \S+\) "


def test_an_exception_in_one_rank_ends_all_with_its_name_and_a_file_with_its_traceback(tmp_path: Path) -> None:
    recipe = sft_recipe(tmp_path)
    ended = launched(recipe, {"rank": 1, "at": "step", "number": 3, "do": "raise"})
    assert ended.status == 1
    (error,) = ended.errors
    assert re.match(RANK_1 + "failed: ValueError: this was to fail; its traceback is in", error)
    assert "rank 0 waited for it in: " in error
    assert "Traceback" not in ended.output
    trace = ended.run / "ranks" / "rank-1.log"
    assert str(trace) in error
    assert "in _raise" in trace.read_text()
    assert ended.outcome["state"] == "failed"
    assert "rank 1 (process" in ended.outcome["reason"]
    assert [line["step"] for line in read_lines(ended.run / "metrics.jsonl")] == [0, 1, 2]


def random_fault(draw: random.Random, at: str) -> dict[str, Any]:
    """A kill of either rank at a moment of that kind."""
    rank = draw.randrange(2)
    moments = {
        "call": {"step": draw.randint(1, 2), "number": draw.randrange(MOST_CALLS)},
        "clock": {"step": draw.randint(1, 2), "number": draw.uniform(0.0, 2.0)},
        "effect": {"number": draw.randrange(1, MOST_EFFECTS[rank])},
    }
    return {"rank": rank, "at": at, "do": "kill", **moments[at]}


def check_kills(two: Ranks, place: Path, faults: Sequence[dict[str, Any]], num_steps: int) -> None:
    """A run whose ranks are killed, and that torchrun starts again, ends with the bits of an uninterrupted one."""
    recipe = changed(
        recipe_of("ppo", make_inputs(place)),
        {"devices.shard": "full", "ppo.num_steps": num_steps, "run.save_every_steps": 1},
    )
    two.run(run, "ppo", recipe, RunOptions(quiet=True))
    expected = outcome(place / "run")
    (place / "run").rename(place / "uninterrupted")
    ended = torchrun(write_recipe("ppo", recipe, place), faults)
    print("\n".join(ended.faults))
    assert ended.status == 0, ended.output
    kills = [line for line in ended.faults if "kill" in line]
    assert len(kills) == len(faults)
    assert len(ended.faults) == len(faults) * 2 + 1, "each kill took one attempt"
    assert_same_outcome(place / "run", expected, after="; ".join(kills))
    assert ended.outcome["state"] == "finished"


def test_after_a_kill_within_a_save_torchrun_goes_on_and_the_run_ends_with_the_same_bits(
    two: Ranks, tmp_path: Path
) -> None:
    check_kills(two, tmp_path, [random_fault(random.Random(5), "effect")], num_steps=2)


@pytest.mark.soak
def test_ten_random_kills_change_nothing(two: Ranks, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    kinds = ["call"] * 3 + ["clock"] * 3 + ["effect"] * 4
    draw.shuffle(kinds)
    start = time.monotonic()
    check_kills(two, tmp_path, [random_fault(draw, kind) for kind in kinds], num_steps=30)
    print(f"10 kills, 30 steps, {time.monotonic() - start:.0f} s")


@pytest.mark.soak
def test_torchrun_starts_a_rank_again_that_was_stopped(tmp_path: Path) -> None:
    recipe = sft_recipe(tmp_path, timeout_seconds=60)
    ended = torchrun(recipe, [{"rank": 1, "at": "step", "number": 4, "do": "stop"}])
    assert ended.status == 0, ended.output
    (error,) = ended.errors
    assert re.match(RANK_1 + "is stopped or gone: no sign of life", error)
    _, stopped, again = (float(line.split()[1]) for line in ended.faults)
    print(f"{error}\nstarted again after {again - stopped:.1f} s")
    assert again - stopped < 60 + 30 + SOON_SECONDS, "the deadline, and the time that torchrun gives to a rank"
    assert [line["step"] for line in read_lines(ended.run / "metrics.jsonl")] == list(range(NUM_STEPS + 1))
    assert ended.outcome["state"] == "finished"


def test_a_store_that_is_gone_is_a_failure_that_is_told_without_it() -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", served.port, is_master=False)
    watch = Watch(store, rank=0, size=2, timeout_seconds=60, store_of="the process that started the ranks")
    watch.start()
    world = ProcessGroupWorld.__new__(ProcessGroupWorld)  # has no other rank
    World.__init__(world)
    world.watch, world.position = watch, Position(3, "scores of gold", waits=False)
    del served
    with pytest.raises(dist.DistNetworkError) as gone:
        store.get("beat/0")
    watch.publish_error(ValueError("first"), None)
    assert watch.failure is not None
    for error in (gone.value, dist.DistNetworkError("Failed to recv, got 0 bytes."), RuntimeError("Broken pipe")):
        explained = world.explain(error)
        assert isinstance(explained, RankError)
        assert str(explained).startswith(watch.failure.message)
    for known in (TrainingError("the reward service: connection reset"), ValueError("broken pipe")):
        assert world.explain(known) is known
    watch.stop()


HANGING = """
import atexit, sys, time
atexit.register(time.sleep, 1000)  # what is registered before stands for what comes after: destructors that hang
from proximo.distributed import join
from proximo.distributed.rank_environment import Place
from proximo.distributed.world import World
from proximo.errors import RankError

class Watch:
    def __getattr__(self, name):
        return lambda *_: None

join._index_of_device = lambda place: {"cuda": 0, "cpu": None}[sys.argv[1]]
join._connect = lambda *_: (None, Watch())
join._make_world = lambda *_, **named: World()
join._destroy = lambda: None
place = Place(
    rank=0, size=2, local_rank=0, local_size=2, host="", port=0, first_hosts_store=False, run="", starter="torchrun"
)
with join.join(place=place):
    atexit.register(print, "a report", end="")
    if sys.argv[2] == "fails":
        raise RankError("rank 1 is gone", exit_status=137)
"""
"""A rank 0 on the device of argument 1, without another rank."""


def test_the_end_of_a_failed_rank_does_not_wait_for_nccl() -> None:
    command = [sys.executable, "-c", HANGING, "cuda", "fails"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    assert ended.returncode == 137, ended.stderr
    assert ended.stdout == "a report", "functions of atexit have run, and what they printed is flushed"
    assert "RankError: rank 1 is gone" in ended.stderr


@pytest.mark.parametrize(("device", "how"), [("cuda", "ends well"), ("cpu", "fails")])
def test_other_ends_are_left_to_the_interpreter(device: str, how: str) -> None:
    program = HANGING.replace("time.sleep, 1000", "print, '.'")
    command = [sys.executable, "-c", program, device, how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    assert (ended.returncode, ended.stdout) == (int(how == "fails"), "a report.\n")


KINDS: dict[str, tuple[Mapping[str, Any], int, str]] = {
    "an exception in rank 0": ({"rank": 0, "at": "step", "number": 3, "do": "raise"}, 1, ""),
    "a refusal in rank 1's build": (
        {"rank": 1, "at": "build", "number": 1, "do": "refuse"},
        2,
        RANK_1 + "failed: DataError: this row is refused; rank 0 waited",
    ),
    "a refusal in rank 0's build": (
        {"rank": 0, "at": "build", "number": 1, "do": "refuse"},
        2,
        "error: this row is refused$",
    ),
    "a refusal of the run folder": (
        {"rank": 0, "at": "folder", "number": 1, "do": "refuse"},
        2,
        "error: this row is refused$",
    ),
    "an exception in rank 1's evaluation": (
        {"rank": 1, "at": "evaluate", "number": 2, "do": "raise"},
        1,
        RANK_1 + "failed: ValueError",
    ),
    "an exception in rank 1's state for a save": (
        {"rank": 1, "at": "state", "number": 1, "do": "raise"},
        1,
        RANK_1 + "failed: ValueError",
    ),
    "a disk that is full in rank 0's save": (
        {"rank": 0, "at": "save", "number": 1, "do": "refuse"},
        2,
        "error: this row is refused$",
    ),
    "rank 1 exits": ({"rank": 1, "at": "step", "number": 3, "do": "exit"}, 3, RANK_1 + "ended with status 3"),
    "rank 1 is killed": ({"rank": 1, "at": "step", "number": 3, "do": "kill"}, 137, RANK_1 + "was ended by SIGKILL"),
    "rank 0 is killed": (
        {"rank": 0, "at": "step", "number": 3, "do": "kill"},
        137,
        r"error: rank 0 \(process \d+ on \S+\) was ended by SIGKILL; rank 1 waited for it in: ",
    ),
    "rank 0 is killed in a save": (
        {"rank": 0, "at": "save", "number": 1, "do": "kill"},
        137,
        r"error: rank 0 \(process \d+ on \S+\) was ended by SIGKILL; rank 1 waited for it in: ",
    ),
    "rank 1 is stopped": (
        {"rank": 1, "at": "step", "number": 3, "do": "stop"},
        1,
        RANK_1 + r"is stopped or gone: no sign of life for \d+ s; rank 0 waited for it in: ",
    ),
    "rank 1 does not arrive": (
        {"rank": 1, "at": "step", "number": 3, "do": "sleep"},
        1,
        RANK_1 + "lives but did not arrive: it is after [a-z ]+ of step 2; rank 0 waited for it in: ",
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_end_with_one_message(kind: str, tmp_path: Path) -> None:
    fault, status, message = KINDS[kind]
    waits = {"timeout_seconds": 60} if fault["do"] in ("stop", "sleep") else {}
    ended = launched(sft_recipe(tmp_path, **waits), fault)
    assert ended.status == status, ended.output
    if message:
        (error,) = ended.errors
        assert re.match(message, error), error
        assert "Traceback" not in ended.output
        if fault["at"] not in ("build", "folder"):
            assert ended.outcome["state"] == "failed"
            assert ended.outcome["reason"] in error
    else:
        assert ended.output.count("ValueError: this was to fail") == 1
    assert "terminate called" not in ended.output


@pytest.mark.soak
@pytest.mark.parametrize(
    ("starter", "number", "status"),
    [(LAUNCHED, signal.SIGTERM, 143), (LAUNCHED, signal.SIGUSR1, 138), (TORCHRUN, signal.SIGTERM, 1)],
    ids=["proximo", "proximo, SIGUSR1", "torchrun"],
)
def test_a_signal_to_all_ranks_at_once_saves_once_and_the_run_goes_on(
    starter: list[str], number: signal.Signals, status: int, tmp_path: Path
) -> None:
    recipe = sft_recipe(tmp_path)
    many = ("sft.num_epochs=80", "run.save_every_steps=1000", "run.evaluate_every_steps=1000")
    process = start([*starter, *rank_command(recipe, [], *many)])
    run = tmp_path / "run"
    wait_for_lines(run, 3)
    os.killpg(process.pid, number)  # the parent passes it on as well
    ended = end(process, recipe)
    assert ended.status == status, ended.output
    assert not ended.errors
    assert ended.output.count(f"{number.name}: ending this step") == 1
    step = read_lines(run / "metrics.jsonl")[-1]["step"]
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == [f"step-{step:06d}"]
    assert ended.outcome["state"] == "stopped"
    resumed = launched(recipe, {}, *many, "--resume")
    assert resumed.status == 0, resumed.output
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl")]
    assert steps == list(range(len(steps)))
    assert len(steps) > step + 2


SERVES = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(float(sys.argv[1]))
"""


def test_a_store_whose_process_is_stopped_is_waited_for_no_longer_than_is_allowed() -> None:
    command = [sys.executable, "-c", SERVES, str(MOST_SECONDS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            store = dist.TCPStore("127.0.0.1", int(process.stdout.readline()), is_master=False)
            answered = DeadlineStore(store, seconds=MOST_SECONDS)
            answered.set("key", "value")
            assert answered.check(["key"])
            assert not answered.check(["key", "another"])
            assert (answered.get("key"), answered.multi_get(["key"])) == (b"value", [b"value"])
            assert answered.compare_set("key", "", "new") == b"value"
            process.send_signal(signal.SIGSTOP)
            # On a busy machine one of its threads could still answer.
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            stopped = DeadlineStore(store, seconds=0.1)
            with pytest.raises(RuntimeError, match=r"no answer within 0\.1 s"):
                stopped.check(["key"])
            process.send_signal(signal.SIGCONT)
            with pytest.raises(RuntimeError, match=r"no answer within 0\.1 s"):
                stopped.get("key")  # nor asked again
        finally:
            process.kill()
