"""The ranks of the tests themselves: one that dies or hangs fails the test that it runs, by name, and no other one."""

import os
import re
import signal
import threading

import pytest

from distributed import ranks
from distributed.ranks import Ranks
from proximo.distributed.world import current


def die_beside_a_collective(rank: int, number: int) -> None:
    if current().rank == rank:
        os.kill(os.getpid(), number)
    current().barrier(what="a test")


def hang(rank: int) -> None:
    if current().rank == rank:
        threading.Event().wait()


def meet() -> list[int]:
    return current().gather(os.getpid(), what="a test")


def assert_fresh(two: Ranks, before: list[int]) -> None:
    first, second = two.run(meet)
    assert first == second
    assert not set(first) & set(before)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_rank_that_dies_is_named_with_its_signal_and_the_next_call_has_fresh_ranks(
    number: signal.Signals, two: Ranks
) -> None:
    before = two.run(meet)[0]
    with pytest.raises(AssertionError, match=rf"^rank 1 was killed by {number.name}") as told:
        two.run(die_beside_a_collective, 1, number)
    if number != signal.SIGKILL:
        assert re.search("File .* in die_beside_a_collective", str(told.value)), "where it was"
    assert "rank 0" not in str(told.value), "it only waited"
    assert_fresh(two, before)


def test_a_rank_that_hangs_is_named_and_the_next_call_has_fresh_ranks(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = two.run(meet)[0]
    with monkeypatch.context() as patched:
        patched.setattr(ranks, "DEADLINE_SECONDS", 0.5)
        with pytest.raises(AssertionError, match="rank 1 did not answer within"):
            two.run(hang, 1)
    assert_fresh(two, before)


def test_an_exception_leaves_the_ranks_as_they_are(two: Ranks) -> None:
    before = two.run(meet)[0]
    with pytest.raises(AssertionError, match=r"(?s)rank 0:.*ZeroDivisionError.*rank 1:.*ZeroDivisionError"):
        two.run(divmod, 1, 0)
    assert two.run(meet)[0] == before
