"""Environments in worker processes and in threads: the same answers; faults that harm no other; nothing left behind."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import example_environments
from pool_clock import PoolClock, hangs
from proximo.environments.environment import EnvironmentFault, EnvironmentStep
from proximo.environments.players import pool as pools
from proximo.environments.players.pool import EnvironmentPool
from proximo.environments.players.processes import ProcessPlayers
from proximo.environments.players.threads import ThreadPlayers
from proximo.errors import ConfigError, DataError
from waiting import wait_until
from worker_processes import workers_of

MIB = 2**20


def in_processes(name: str, *, workers: int = 4, memory_bytes: int | None = None, **options: Any) -> EnvironmentPool:
    players = ProcessPlayers(f"example_environments:{name}", options, memory_bytes=memory_bytes)
    return EnvironmentPool(players, name=name, workers=workers, timeout_seconds=120.0)


def in_threads(name: str, *, workers: int = 4, **options: Any) -> EnvironmentPool:
    make = getattr(example_environments, name)
    return EnvironmentPool(ThreadPlayers(lambda: make(**options)), name=name, workers=workers, timeout_seconds=120.0)


def answer(pool: EnvironmentPool, *lanes: int) -> dict[int, EnvironmentStep | EnvironmentFault]:
    """The next answer of each lane, which are all that answer."""
    found: dict[int, EnvironmentStep | EnvironmentFault] = {}

    def look() -> bool:
        for lane, each in pool.poll(0.05):
            assert lane in lanes
            assert lane not in found
            found[lane] = each
        return len(found) == len(lanes)

    wait_until(look, f"answers of {lanes}")
    return found


def began(pool: EnvironmentPool, lane: int, **row: Any) -> EnvironmentStep:
    pool.start(lane, seed=lane, row=row)
    step = answer(pool, lane)[lane]
    assert isinstance(step, EnvironmentStep), step
    return step


def stepped(pool: EnvironmentPool, lane: int, text: str) -> EnvironmentStep:
    pool.step(lane, text)
    step = answer(pool, lane)[lane]
    assert isinstance(step, EnvironmentStep), step
    return step


def fault(pool: EnvironmentPool, lane: int, text: str) -> EnvironmentFault:
    pool.step(lane, text)
    return fault_of(pool, lane)


def fault_of(pool: EnvironmentPool, lane: int) -> EnvironmentFault:
    found = answer(pool, lane)[lane]
    assert isinstance(found, EnvironmentFault), found
    pool.stop(lane)
    return found


def hung(pool: EnvironmentPool, lane: int, begun: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentFault:
    """What comes of a step that hangs. Its deadline is set before the clock may jump, else it would jump too."""
    pool.step(lane, "hang")
    monkeypatch.setattr(pools, "time", PoolClock((hangs(begun, 1), 600.0)))
    return fault_of(pool, lane)


def processes_of_the_group_leader(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("make", [in_processes, in_threads])
@pytest.mark.parametrize("name", ["Echo", "Async"])
def test_many_at_once_give_their_own_answers(make: Any, name: str) -> None:
    pool = make(name)
    try:
        for lane in range(6):
            pool.start(lane, seed=lane, row={"number": lane})
        for lane in range(6):  # two of them wait for a lane that ends
            pool.poll(0.0) if lane < 4 else pool.stop(lane - 4)
        pool.stop(2)
        pool.stop(3)
        found = answer(pool, 4, 5)
        assert {lane: each.observation for lane, each in found.items()} == {
            lane: f"seed {lane}, row {{'number': {lane}}}" for lane in (4, 5)
        }
        last = stepped(pool, 4, "end")
        assert (last.observation, last.reward, last.terminated, last.truncated) == ("end 1", 0.5, True, False)
        assert last.info == {"steps": 1}
        assert last.seconds >= 0
        assert stepped(pool, 5, "cut").truncated
    finally:
        pool.close()


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[EnvironmentPool]:
    pool = in_processes("Faulty", memory_bytes=512 * MIB, begun=str(tmp_path / "begun"))
    began(pool, 0)
    yield pool
    assert stepped(pool, 0, "say still there").observation == "still there", "no fault of another lane has harmed it"
    pool.close()
    assert workers_of(os.getpid()) == []


FAULTS = {
    "raise loudly": ("error", r"step\(\) raised ValueError: it broke: loudly \(.*example_environments.py, line \d+\)"),
    "quit": ("error", r"step\(\) raised SystemExit: 0 .*"),
    "leave 3": ("died", "its process ended with status 3"),
    "leak": ("memory", r"step\(\) ran out of memory"),
    "flood": ("invalid", r"the observation of step\(\) has 4,194,305 characters, more than 4,194,304"),
    "return": ("invalid", r"step\(\) must return observation as a text, or a list of messages .* list \[1, 2\]"),
}


def test_faults_of_a_step_say_what_happened_and_harm_no_other(faulty: EnvironmentPool) -> None:
    for number, (text, (kind, reason)) in enumerate(FAULTS.items(), start=1):
        process = began(faulty, number).info["process"]
        found = fault(faulty, number, text)
        assert found.kind == kind, found
        assert re.fullmatch(reason, found.reason), found
        wait_until(lambda process=process: faulty.poll(0.0) == [] and not os.path.exists(f"/proc/{process}"))
    assert faulty.take_retries() == 0


def test_an_environment_that_hangs_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    pool = in_processes("Faulty", begun=str(begun))
    try:
        began(pool, 0)
        process = began(pool, 1).info["process"]
        child = int(stepped(pool, 1, "child").observation)
        found = hung(pool, 1, begun, monkeypatch)
        assert found == EnvironmentFault(reason="step() did not answer within timeout_seconds = 120", kind="timeout")
        wait_until(lambda: pool.poll(0.0) == [] and not os.path.exists(f"/proc/{process}"))
        wait_until(lambda: not processes_of_the_group_leader(child))
        assert stepped(pool, 0, "say still there").observation == "still there"
    finally:
        pool.close()


def test_a_reset_that_fails_is_tried_again_in_another_process(tmp_path: Path) -> None:
    pool = in_processes("Faulty", begun=str(tmp_path / "begun"))
    try:
        assert began(pool, 1, do="raise once").observation == "raised before"
        pool.start(2, seed=2, row={"do": "leave 4"})
        assert answer(pool, 2) == {2: EnvironmentFault(reason="its process ended with status 4", kind="died")}
        assert pool.take_retries() == 3
    finally:
        pool.close()


def test_environments_outlive_the_thread_that_made_them() -> None:
    pools: list[EnvironmentPool] = []
    maker = threading.Thread(target=lambda: pools.append(in_processes("Echo")))
    maker.start()
    maker.join()
    (pool,) = pools
    try:
        assert began(pool, 1).observation == "seed 1, row {}"
        assert pool.take_retries() == 0
    finally:
        pool.close()


def test_what_an_environment_prints_disturbs_nothing(tmp_path: Path) -> None:
    pool = in_processes("Faulty")
    try:
        began(pool, 1)
        assert stepped(pool, 1, "print").observation == "printed"
    finally:
        pool.close()


def test_an_environment_that_uses_the_random_numbers_of_its_process_repeats_itself() -> None:
    def played(pool: EnvironmentPool, lane: int) -> list[Any]:
        return [began(pool, lane).observation, *(stepped(pool, lane, "").observation for _ in range(3))]

    pool = in_processes("Dice", workers=3)
    try:
        alone = played(pool, 5)
        pool.stop(5)
        began(pool, 6)
        stepped(pool, 6, "")
        assert played(pool, 5) == alone
        assert played(pool, 7) != alone
    finally:
        pool.close()


def test_rows_larger_than_a_pipe_arrive(tmp_path: Path) -> None:
    pool = in_processes("Faulty")
    try:
        text = "x" * (3 * MIB)
        assert began(pool, 1, do=f"say {text}").observation == text
        with pytest.raises(DataError, match="cannot be sent to the process of its environment"):
            pool.start(2, seed=2, row={"column": {1, 2}})
        assert began(pool, 2).observation == "began", "the lane is free"
    finally:
        pool.close()


def test_the_end_closes_environments_and_leaves_no_process(tmp_path: Path) -> None:
    mark = tmp_path / "closed"
    pool = in_processes("Echo", mark=str(mark))
    processes = [began(pool, lane).info["process"] for lane in (1, 2)]
    pool.stop(1)
    assert len(workers_of(os.getpid())) == 3, "the nursery and two players"
    pool.close()
    assert mark.exists()
    assert workers_of(os.getpid()) == []
    assert not any(os.path.exists(f"/proc/{process}") for process in processes)
    pool.close()


def test_players_end_with_the_process_that_they_were_forked_from_and_others_take_their_place() -> None:
    pool = in_processes("Faulty")
    try:
        process = began(pool, 1).info["process"]
        child = int(stepped(pool, 1, "child").observation)
        began(pool, 2)
        pool.step(2, "say before")
        assert isinstance(answer(pool, 2)[2], EnvironmentStep)
        nursery = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(nursery, signal.SIGKILL)
        wait_until(lambda: not processes_of_the_group_leader(process), "the end of the player")
        found = fault(pool, 1, "say on")
        assert found.kind == "died"
        assert began(pool, 3).observation == "began"
        wait_until(lambda: not processes_of_the_group_leader(child), "the end of what a player had started")
    finally:
        pool.close()


def test_whatever_is_killed_every_call_has_one_answer_and_none_is_wrong() -> None:
    draw = random.Random(7)
    pool = in_processes("Echo", workers=5)
    asked, begun = dict.fromkeys(range(25), 0), iter(range(25))
    playing: dict[int, int] = {}
    num_faults = 0

    def begin() -> None:
        if (lane := next(begun, None)) is not None:
            pool.start(lane, seed=lane, row={})
            playing[lane] = 0

    def take(lane: int, found: EnvironmentStep | EnvironmentFault) -> bool:
        """Whether the episode goes on."""
        asked[lane] += 1
        if isinstance(found, EnvironmentFault):
            assert found.kind == "died", found
            return False
        assert found.observation == (f"seed {lane}, row {{}}" if asked[lane] == 1 else f"turn {asked[lane] - 1}")
        if asked[lane] == 1 and found.info["process"] and draw.random() < 0.3:
            with suppress(ProcessLookupError):
                os.kill(found.info["process"], draw.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))
        return asked[lane] < 5

    try:
        for _ in range(8):
            begin()
        while playing:
            for lane, found in pool.poll(5.0):
                if take(lane, found):
                    pool.step(lane, "turn")
                    continue
                num_faults += isinstance(found, EnvironmentFault)
                pool.stop(lane)
                del playing[lane]
                begin()
        assert max(asked.values()) == 5
        assert 0 < num_faults < 25
    finally:
        pool.close()
    assert workers_of(os.getpid()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent ended")
def test_nothing_outlives_a_trainer_that_is_killed() -> None:
    program = (
        "from proximo.environments.players.pool import EnvironmentPool\n"
        "from proximo.environments.players.processes import ProcessPlayers\n"
        "players = ProcessPlayers('example_environments:Faulty', {'begun': '/dev/null'}, memory_bytes=None)\n"
        "pool = EnvironmentPool(players, name='e', workers=3, timeout_seconds=600.0)\n"
        "for lane in (1, 2, 3):\n"
        "    pool.start(lane, seed=lane, row={'do': 'child'})\n"
        "children = []\n"
        "while len(children) < 3:\n"
        "    children += [each.observation for _, each in pool.poll(1.0)]\n"
        "pool.step(1, 'hang')\n"
        "print(*children, flush=True)\n"
        "pool.poll(600.0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as trainer:
        assert trainer.stdout is not None
        children = [int(each) for each in trainer.stdout.readline().split()]
        assert len(children) == 3
        trainer.kill()
    wait_until(lambda: workers_of(trainer.pid) == [])
    wait_until(lambda: not any(processes_of_the_group_leader(child) for child in children))


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("example_environments:Nobody", {}, "example_environments has no class or function 'Nobody'"),
        ("no_such_module:Nobody", {}, "no_such_module cannot be imported"),
        ("no_such_file.py:Nobody", {}, "there is no such file"),
        ("example_environments:Echo", {"speed": 1}, "is made with speed, but"),
    ],
)
def test_an_environment_that_is_not_there_is_named(path: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ProcessPlayers(path, options, memory_bytes=None)
    assert workers_of(os.getpid()) == []


def test_an_environment_that_cannot_be_made_or_played_is_named() -> None:
    with pytest.raises(ConfigError, match=r"environment Broken: it cannot be made: OSError: no such service \(.*line"):
        in_processes("Broken")
    needs = r"an environment needs reset\(seed=..., row=...\) and step\(text\), but it \(NoStep\) has no method step"
    for make in (in_processes, in_threads):
        with pytest.raises(ConfigError, match=needs):
            make("NoStep")
    assert workers_of(os.getpid()) == []


def test_a_class_in_a_file_is_an_environment(tmp_path: Path) -> None:
    file = tmp_path / "my_game.py"
    file.write_text(
        "class Game:\n"
        "    def reset(self, seed, row):\n"
        "        return 'hello', {}\n"
        "    def step(self, text):\n"
        "        return text, 1, True, False, {}\n"
    )
    pool = EnvironmentPool(
        ProcessPlayers(f"{file}:Game", {}, memory_bytes=None), name="Game", workers=1, timeout_seconds=120.0
    )
    try:
        assert began(pool, 1).observation == "hello"
        step = stepped(pool, 1, "bye")
        assert (step.observation, step.reward, step.terminated) == ("bye", 1.0, True)
    finally:
        pool.close()


def test_a_thread_that_hangs_is_left_alone_and_others_play_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tmp_path / "begun"
    pool = in_threads("Faulty", begun=str(begun))
    began(pool, 0)
    began(pool, 1)
    assert hung(pool, 1, begun, monkeypatch).kind == "timeout"
    assert stepped(pool, 0, "say still there").observation == "still there"
    assert began(pool, 2).observation == "began"
    pool.close()
