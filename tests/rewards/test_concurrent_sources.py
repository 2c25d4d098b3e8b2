"""Several sources at once: which wait beside each other, in which order they add up, and what a failure does."""

import threading
from collections.abc import Sequence

import pytest

from proximo.errors import TrainingError
from proximo.metrics.values import Sum
from proximo.records import Response, Scored
from proximo.rewards import weighted as sources_at_once
from proximo.rewards.function import FunctionReward
from proximo.rewards.weighted import WeightedReward
from records_made import response
from waiting import LATEST_SECONDS


class Meeting:
    """A source that answers when so many are being asked at the same time."""

    concurrent = True

    def __init__(self, name: str, score: float, barrier: threading.Barrier) -> None:
        self.name, self.value, self.barrier = name, score, barrier
        self.begun: list[Response] = []
        self.closed = False

    def begin(self, response: Response) -> None:
        self.begun.append(response)

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        self.barrier.wait(LATEST_SECONDS)
        return [Scored(response=each, score=self.value) for each in responses]

    def statistics(self) -> dict[str, Sum]:
        return {f"source/{self.name}/retries": Sum(1)}

    def close(self) -> None:
        self.closed = True


class Computing:
    """A source that works in the thread that asks it, as a reward model does."""

    def __init__(self, name: str, threads: list[threading.Thread]) -> None:
        self.name, self.threads = name, threads

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        self.threads.append(threading.current_thread())
        return [Scored(response=each, score=float(len(self.threads))) for each in responses]


def test_sources_that_wait_are_asked_at_once_and_the_others_one_by_one_here() -> None:
    barrier, threads = threading.Barrier(3), []
    sources = [
        Meeting("a", 1.0, barrier),
        Computing("b", threads),
        Meeting("c", 10.0, barrier),
        Computing("d", threads),
        Meeting("e", 100.0, barrier),
    ]
    (found,) = WeightedReward([(1.0, source) for source in sources]).score([response()])
    assert dict(found.components) == {"a": 1.0, "b": 1.0, "c": 10.0, "d": 2.0, "e": 100.0}
    assert list(found.components) == ["a", "b", "c", "d", "e"]
    assert threads == [threading.main_thread()] * 2


def test_no_more_than_so_many_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_at_once, "MAX_CONCURRENT", 2)
    lock, running, most, two = threading.Lock(), [0], [0], threading.Barrier(2)

    def counted(prompts: object, responses: Sequence[str], metadata: object) -> list[float]:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        two.wait(LATEST_SECONDS)
        threading.Event().wait(0.02)  # a third one would show
        with lock:
            running[0] -= 1
        return [1.0 for _ in responses]

    sources = [(1.0, FunctionReward(counted, name=f"f{n}")) for n in range(6)]
    (found,) = WeightedReward(sources).score([response()])
    assert found.score == 6.0
    assert most == [2]


def test_a_source_that_fails_as_a_whole_stops_the_run_though_others_still_wait() -> None:
    go_on, ended = threading.Event(), threading.Event()

    def waits(prompts: object, responses: Sequence[str], metadata: object) -> list[float]:
        go_on.wait(LATEST_SECONDS)
        ended.set()
        return [1.0 for _ in responses]

    sources = [
        FunctionReward(waits, name="waits"),
        FunctionReward(lambda prompts, responses, metadata: 1 / 0, name="fails"),
    ]
    with pytest.raises(TrainingError, match="'fails' raised ZeroDivisionError"):
        WeightedReward([(1.0, source) for source in sources]).score([response()])
    assert not ended.is_set()
    go_on.set()


def test_all_sources_are_told_counted_and_closed() -> None:
    barrier = threading.Barrier(1)
    sources = [Meeting("a", 1.0, barrier), Computing("b", []), Meeting("c", 1.0, barrier)]
    reward = WeightedReward([(1.0, source) for source in sources])
    told = response()
    reward.begin(told)
    assert reward.statistics() == {"source/a/retries": Sum(1), "source/c/retries": Sum(1)}
    reward.close()
    for source in sources:
        if isinstance(source, Meeting):
            assert source.begun == [told]
            assert source.closed
