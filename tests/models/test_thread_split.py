"""Two tasks at the same time: each with half of the threads, and the caller gets both ends of it."""

import os
import signal
import sys
import threading
import time
from contextvars import ContextVar

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from proximo.models.cpu import thread_split
from proximo.models.cpu.thread_split import (
    PeerFailedError,
    can_split_threads,
    check_peer,
    has_peer,
    operators_are_watched,
    run_overlapped,
    use_all_threads,
)
from waiting import LATEST_SECONDS, wait_until

NAME: ContextVar[str] = ContextVar("name", default="nobody")


@pytest.fixture
def four_threads():
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


def test_two_tasks_run_at_the_same_time_and_answer_in_their_order(four_threads: None) -> None:
    both = threading.Barrier(2)

    def task(name: str) -> tuple[str, int, bool]:
        both.wait(LATEST_SECONDS)  # passed only where the other task has begun too
        return name, torch.get_num_threads(), torch.is_grad_enabled()

    with torch.no_grad():
        assert run_overlapped([lambda: task("a"), lambda: task("b")]) == [("a", 2, False), ("b", 2, False)]
    assert run_overlapped([lambda: task("a"), lambda: task("b")])[1] == ("b", 2, True)
    assert torch.get_num_threads() == 4


def test_a_task_alone_has_all_threads(four_threads: None) -> None:
    assert run_overlapped([torch.get_num_threads]) == [4]
    with pytest.raises(ValueError, match="3 tasks"):
        run_overlapped([torch.get_num_threads] * 3)


def test_both_lanes_find_the_context_of_the_caller() -> None:
    reset = NAME.set("somebody")
    assert run_overlapped([NAME.get, NAME.get]) == ["somebody", "somebody"]
    NAME.reset(reset)
    assert run_overlapped([NAME.get, NAME.get]) == ["nobody", "nobody"]


@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_lane_raises_reaches_the_caller_when_both_have_ended(failing: int, four_threads: None) -> None:
    ended = []

    def fails() -> None:
        raise KeyError("no such thing")

    def takes_longer() -> None:
        time.sleep(0.2)
        ended.append(True)

    tasks = [takes_longer, takes_longer]
    tasks[failing] = fails
    with pytest.raises(KeyError, match="no such thing"):
        run_overlapped(tasks)
    assert ended == [True]
    assert torch.get_num_threads() == 4
    assert run_overlapped([lambda: 1, lambda: 2]) == [1, 2]


def learn(ended: threading.Event) -> None:
    """Minibatch after minibatch, until the neighbour fails."""
    try:
        wait_until(check_peer, "the failure of the neighbour")
    except PeerFailedError:
        ended.set()
        raise


def test_an_interrupt_of_the_caller_ends_the_other_task_too(four_threads: None) -> None:
    begun, ended = threading.Event(), threading.Event()

    def interrupted() -> None:
        begun.wait(LATEST_SECONDS)
        raise KeyboardInterrupt

    def epochs() -> None:
        begun.set()
        learn(ended)

    with pytest.raises(KeyboardInterrupt):
        run_overlapped([interrupted, epochs])
    assert ended.is_set()
    check_peer()  # and nothing of it is left behind


def caller_waits() -> bool:
    """Asked in the second task: whether the first one has ended and its thread is in a wait."""
    peer, caller = thread_split._PEER.get(), sys._current_frames()[threading.main_thread().ident or 0]
    return peer is not None and peer.ended.is_set() and caller.f_code is threading.Condition.wait.__code__


def test_an_interrupt_while_the_caller_waits_is_raised_when_the_other_task_has_ended() -> None:
    ended = threading.Event()

    def epochs() -> None:
        wait_until(caller_waits)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        learn(ended)

    # A process that was started in the background ignores this signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_overlapped([lambda: None, epochs])
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()


@pytest.mark.parametrize("longer", [0, 1])
def test_the_longer_task_has_all_threads_when_the_other_has_ended(longer: int, four_threads: None) -> None:
    ended = []
    begun = threading.Event()

    def takes_long() -> list[object]:
        threads = [torch.get_num_threads()]
        begun.set()
        use_all_threads()
        return [*threads, *ended, torch.get_num_threads()]

    def is_short() -> None:
        assert begun.wait(LATEST_SECONDS)
        ended.append(has_peer())

    tasks = [is_short, is_short]
    tasks[longer] = takes_long
    assert run_overlapped(tasks)[longer] == [2, True, 4]
    assert torch.get_num_threads() == 4
    assert not has_peer()
    use_all_threads()  # nobody to wait for
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("failing", [0, 1])
def test_who_waits_for_a_task_that_fails_is_abandoned(failing: int, four_threads: None) -> None:
    found = []

    def fails() -> None:
        time.sleep(0.1)
        raise KeyError("no such thing")

    def waits() -> None:
        try:
            use_all_threads()
        except PeerFailedError:
            found.append(torch.get_num_threads())
            raise

    tasks = [waits, waits]
    tasks[failing] = fails
    with pytest.raises(KeyError, match="no such thing"):
        run_overlapped(tasks)
    assert found == [2]


def test_gradients_in_both_lanes_are_those_of_one() -> None:
    torch.manual_seed(0)
    given, weights = torch.randn(64, 32), [torch.randn(32, 32, requires_grad=True) for _ in range(2)]

    def gradient(weight: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad((given @ weight).tanh().square().sum(), weight)
        return found

    alone = [gradient(weight) for weight in weights]
    together = run_overlapped([lambda: gradient(weights[0]), lambda: gradient(weights[1])])
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_a_forked_child_has_lanes_too() -> None:
    child = os.fork()
    if child == 0:
        os._exit(sum(run_overlapped([lambda: 3, lambda: 4])))
    try:
        wait_until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT), "the end of the child")
    finally:
        os.kill(child, signal.SIGKILL)  # changes nothing where it has ended
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_split_threads_need_a_cpu_with_an_even_number_of_threads_and_nobody_who_counts() -> None:
    assert [can_split_threads("cpu", num_threads=number) for number in (1, 2, 3, 8)] == [False, True, False, True]
    assert not can_split_threads("cuda", num_threads=2)
    assert not can_split_threads("cpu")  # one thread, as all tests
    assert not operators_are_watched()
    with FlopCounterMode(display=False):
        assert operators_are_watched()
    # torch 2.11 warns without acc_events.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert operators_are_watched()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert operators_are_watched()
    assert not operators_are_watched()
