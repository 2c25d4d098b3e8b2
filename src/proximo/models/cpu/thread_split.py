"""Runs two tasks at the same time on a CPU with half of the threads each: overlapped updates of policy and critic.

A second thread does not speed up small operators, attention over one sequence and the Python code between operators.
A second pass that runs beside the first makes use of it. Splitting one pass in two gains little (benchmarks/README.md).
"""

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

Result = TypeVar("Result")

_NUM_TASKS = 2
"""More tasks would wait for each other for the global interpreter lock."""


class PeerFailedError(Exception):
    """Raised in one task after the other one has failed, so that it stops training."""


def can_split_threads(device: str, *, num_threads: int | None = None) -> bool:
    """True on a CPU with an even number of threads. `num_threads`: None for the number that torch uses."""
    return device == "cpu" and (num_threads or torch.get_num_threads()) % _NUM_TASKS == 0


def operators_are_watched() -> bool:
    """True under a dispatch or function mode, a profiler or a CPU autocast of the caller's thread.

    They would miss operators that run in another thread.
    """
    modes = _get_current_dispatch_mode() is not None or _get_current_function_mode() is not None
    return modes or torch.autograd._profiler_enabled() or torch.is_autocast_enabled("cpu")


def run_overlapped(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run at most two tasks at the same time and return their results in order. The first runs in the caller's thread.

    Each task gets half of the caller's threads (all, after `use_all_threads`), its grad mode and its context variables.
    If a task fails, its error is raised when both have ended, a KeyboardInterrupt included.
    """
    if len(tasks) > _NUM_TASKS:
        raise ValueError(f"{len(tasks)} tasks were given, but only {_NUM_TASKS} run at a time")
    if len(tasks) < _NUM_TASKS:
        return [task() for task in tasks]
    num_threads, grad_enabled = torch.get_num_threads(), torch.is_grad_enabled()
    results: list[Any] = [None] * _NUM_TASKS
    errors: list[BaseException] = []
    failed, ends = threading.Event(), [threading.Event() for _ in tasks]

    def run(index: int) -> None:
        torch.set_num_threads(max(1, num_threads // _NUM_TASKS))
        _PEER.set(_Peer(failed=failed, ended=ends[1 - index], num_threads=num_threads))
        try:
            with torch.set_grad_enabled(grad_enabled):
                results[index] = tasks[index]()
        except BaseException as error:  # raised below, in the caller's thread
            errors.append(error)
            failed.set()
        finally:
            ends[index].set()

    # A daemon thread, so that a process that must exit at once does not wait for the end of an epoch.
    other = threading.Thread(target=copy_context().run, args=(run, 1), name="second-task", daemon=True)
    try:
        other.start()
        copy_context().run(run, 0)
    except BaseException:  # an interrupt outside of the task
        failed.set()
        ends[0].set()
        raise
    finally:
        while other.ident is not None and not ends[1].is_set():
            try:
                ends[0].set()  # also if an interrupt came before `run` set it
                ends[1].wait()  # not join(): an interrupted join() marks the thread as ended (CPython 3.11)
            except BaseException as error:  # an interrupt; `failed` stops the other task
                errors.append(error)
                failed.set()
        torch.set_num_threads(num_threads)  # after the other task: new threads begin with this number
    for error in sorted(errors, key=lambda error: isinstance(error, PeerFailedError)):
        raise error
    return results


def check_peer() -> None:
    """Call regularly within a task. Raises PeerFailedError if the other task has failed."""
    peer = _PEER.get()
    if peer is not None and peer.failed.is_set():
        raise PeerFailedError("the task that ran at the same time has failed")


def has_peer() -> bool:
    """True within one of two overlapped tasks, also after the other one has ended."""
    return _PEER.get() is not None


def use_all_threads() -> None:
    """Wait until the other task has ended, then use the threads of both. Does nothing outside of overlapped tasks.

    Call it at a fixed point of the work, not depending on time, so that every run computes each part with the same
    number of threads. Only one of the two tasks may call it. Raises PeerFailedError if the other one has failed.
    """
    peer = _PEER.get()
    if peer is not None:
        peer.ended.wait()
        check_peer()
        torch.set_num_threads(peer.num_threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Peer:
    """What a task can see of the other one."""

    failed: threading.Event
    """Set when either task has failed."""
    ended: threading.Event
    """Set when the other task has ended."""
    num_threads: int
    """Threads of both tasks together."""


_PEER: ContextVar[_Peer | None] = ContextVar("peer", default=None)
