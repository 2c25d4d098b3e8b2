"""The pool of environments, with players and a clock that the test moves."""

from collections.abc import Mapping
from typing import Any

import pytest

from proximo.environments.environment import EnvironmentFault, EnvironmentStep
from proximo.environments.players import pool as pools
from proximo.environments.players.pool import ATTEMPTS, EnvironmentPool
from proximo.environments.players.threads import PlayerEnded
from proximo.errors import ConfigError

OBSERVED = {"value": {"observation": "began", "info": {}}, "seconds": 0.25}


def acted(observation: str) -> dict[str, Any]:
    value = {"observation": observation, "reward": 1.0, "terminated": False, "truncated": False, "info": {}}
    return {"value": value, "seconds": 0.25}


class MovedClock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class ScriptedPlayers:
    """Players that reply when the test says so. Each is made at once, unless `broken` says why not."""

    def __init__(self, clock: MovedClock, broken: str | None = None) -> None:
        self.clock = clock
        self.broken = broken
        self.asked: list[tuple[int, Mapping[str, Any]]] = []
        self.ended: list[int] = []
        self.news: list[tuple[int, dict[str, Any] | PlayerEnded]] = []
        self.num_opened = 0
        self.num_waits = 0
        self.is_closed = False

    def begin_player(self) -> int:
        self.num_opened += 1
        return self.num_opened

    def send(self, number: int, request: Mapping[str, Any]) -> None:
        if request["call"] == "make":
            made = {"value": None, "seconds": 0.0}
            self.news.append((number, {"raised": self.broken, "kind": "error"} if self.broken else made))
        else:
            self.asked.append((number, request))

    def wait(self, seconds: float) -> list[tuple[int, dict[str, Any] | PlayerEnded]]:
        self.num_waits += 1
        news, self.news = self.news, []
        self.clock.now += 0.0 if news else seconds
        return news

    def end(self, number: int) -> None:
        self.ended.append(number)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    clock = MovedClock()
    monkeypatch.setattr(pools, "time", clock)
    return clock


def a_pool(clock: MovedClock, workers: int = 2) -> tuple[EnvironmentPool, ScriptedPlayers]:
    players = ScriptedPlayers(clock)
    return EnvironmentPool(players, name="e", workers=workers, timeout_seconds=60.0), players


def test_an_episode_is_a_reset_and_steps_each_with_one_answer(clock: MovedClock) -> None:
    pool, players = a_pool(clock)
    pool.start(7, seed=3, row={"a": 1})
    assert players.asked == [(1, {"call": "reset", "seed": 3, "row": {"a": 1}})]
    players.news.append((1, OBSERVED))
    assert pool.poll(0.0) == [(7, EnvironmentStep(observation="began", seconds=0.25))]
    pool.step(7, "hello")
    assert players.asked[-1] == (1, {"call": "step", "text": "hello"})
    players.news.append((1, acted("hello to you")))
    assert pool.poll(0.0) == [(7, EnvironmentStep(observation="hello to you", reward=1.0, seconds=0.25))]
    assert pool.poll(0.0) == []
    pool.close()
    assert players.is_closed


def test_episodes_beyond_the_workers_wait_for_a_lane_that_is_stopped(clock: MovedClock) -> None:
    pool, players = a_pool(clock, workers=2)
    for lane in (1, 2, 3):
        pool.start(lane, seed=lane, row={})
    pool.poll(0.0)
    assert [request["seed"] for _, request in players.asked] == [1, 2]
    players.news.append((2, OBSERVED))
    assert [lane for lane, _ in pool.poll(0.0)] == [2]
    pool.stop(2)
    assert players.asked[-1] == (2, {"call": "reset", "seed": 3, "row": {}})
    assert players.num_opened == 2


def test_a_slow_environment_delays_no_other(clock: MovedClock) -> None:
    pool, players = a_pool(clock)
    pool.start(1, seed=1, row={})
    pool.start(2, seed=2, row={})
    for step in range(5):
        players.news.append((2, acted("")) if step else (2, OBSERVED))
        assert [lane for lane, _ in pool.poll(0.0)] == [2]
        pool.step(2, "on")


def test_a_reset_is_tried_again_elsewhere_and_then_a_fault(clock: MovedClock) -> None:
    pool, players = a_pool(clock)
    pool.start(1, seed=1, row={})
    for attempt in range(1, ATTEMPTS + 1):
        assert len(players.asked) == attempt
        players.news.append((players.asked[-1][0], {"raised": "reset() raised OSError", "kind": "error"}))
        answers = pool.poll(10.0)
        if not answers:
            assert len({number for number, _ in players.asked}) == len(players.asked), "each in a new player"
    assert answers == [(1, EnvironmentFault(reason="reset() raised OSError", kind="error"))]
    assert pool.take_retries() == ATTEMPTS - 1
    pool.stop(1)


def test_between_attempts_there_is_a_pause_and_no_busy_waiting(clock: MovedClock) -> None:
    pool, players = a_pool(clock)
    pool.start(1, seed=1, row={})
    players.news.append((1, {"raised": "reset() raised OSError", "kind": "error"}))
    start, waits = clock.now, players.num_waits
    assert pool.poll(0.01) == []
    assert len(players.asked) == 1
    assert pool.poll(30.0) == []
    assert len(players.asked) == 2
    assert players.num_waits < waits + 10
    assert clock.now == pytest.approx(start + 30.01)


def test_a_step_is_never_repeated(clock: MovedClock) -> None:
    pool, players = a_pool(clock)
    pool.start(1, seed=1, row={})
    players.news.append((1, OBSERVED))
    pool.poll(0.0)
    pool.step(1, "go")
    players.news.append((1, {"raised": "step() raised OSError", "kind": "error"}))
    assert pool.poll(0.0) == [(1, EnvironmentFault(reason="step() raised OSError", kind="error"))]
    assert players.ended == [1], "what state it is in is not known"
    pool.stop(1)
    pool.start(2, seed=2, row={})
    assert players.asked[-1][0] == 2


def test_a_hanging_step_is_a_fault_at_its_deadline_and_only_there(clock: MovedClock) -> None:
    pool, players = a_pool(clock)
    for lane in (1, 2):
        pool.start(lane, seed=1, row={})
        players.news.append((lane, OBSERVED))
        pool.poll(0.0)
    pool.step(1, "hang")
    clock.now += 59.0
    pool.step(2, "late but in time")
    assert pool.poll(0.5) == []
    reason = "step() did not answer within timeout_seconds = 60"
    assert pool.poll(10.0) == [(1, EnvironmentFault(reason=reason, kind="timeout"))]
    assert players.ended == [1]
    players.news.append((2, acted("ok")))
    assert [lane for lane, _ in pool.poll(0.0)] == [2]


def test_an_answer_that_has_arrived_is_not_late(clock: MovedClock) -> None:
    pool, players = a_pool(clock)
    pool.start(1, seed=1, row={})
    players.news.append((1, OBSERVED))
    clock.now += 1000.0
    assert pool.poll(0.0) == [(1, EnvironmentStep(observation="began", seconds=0.25))]


def test_a_stopped_lane_hears_nothing_more_and_its_player_goes_on(clock: MovedClock) -> None:
    pool, players = a_pool(clock, workers=1)
    pool.start(1, seed=1, row={})
    pool.stop(1)
    pool.start(2, seed=2, row={})
    assert [request["seed"] for _, request in players.asked] == [1]
    players.news.append((1, OBSERVED))
    assert pool.poll(0.0) == []
    pool.poll(0.0)
    assert [request["seed"] for _, request in players.asked] == [1, 2]
    players.news.append((1, OBSERVED))
    assert [lane for lane, _ in pool.poll(0.0)] == [2]


def test_an_environment_that_dies_while_the_policy_writes_is_a_fault_of_the_next_step(clock: MovedClock) -> None:
    pool, players = a_pool(clock)
    pool.start(1, seed=1, row={})
    players.news.append((1, OBSERVED))
    pool.poll(0.0)
    players.news.append((1, PlayerEnded("was ended by SIGKILL")))
    assert pool.poll(0.0) == []
    pool.step(1, "go")
    assert pool.poll(0.0) == [(1, EnvironmentFault(reason="its process was ended by SIGKILL", kind="died"))]


def test_nobody_is_waited_for_longer_than_asked(clock: MovedClock) -> None:
    pool, players = a_pool(clock)
    pool.start(1, seed=1, row={})
    pool.poll(0.0)
    start = clock.now
    assert pool.poll(2.5) == []
    assert clock.now == start + 2.5
    players.news.append((1, OBSERVED))
    pool.poll(2.5)
    assert clock.now == start + 2.5
    pool.stop(1)
    assert pool.poll(2.5) == []
    assert clock.now == start + 2.5, "there is nothing to wait for"


def test_an_environment_that_cannot_be_made_is_an_error_at_once(clock: MovedClock) -> None:
    players = ScriptedPlayers(clock, broken="it cannot be made: OSError: no such service")
    with pytest.raises(ConfigError, match="environment e: it cannot be made: OSError: no such service"):
        EnvironmentPool(players, name="e", workers=2, timeout_seconds=60.0)
    assert players.is_closed
