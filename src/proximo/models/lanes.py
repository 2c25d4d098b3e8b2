"""Two passes at a time on a CPU, each with half of its threads. Not what the passes are.

Small operators, attention over one sequence and all that is between operators gain nothing from a second thread; a
second pass beside the first does. A pass that is cut in two gains nothing either (benchmarks/README.md).
"""

import contextvars
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

Result = TypeVar("Result")

_LANES = 2
"""More would wait for each other at the interpreter's lock."""


def has_lanes(device: str, *, num_threads: int | None = None) -> bool:
    """True on a CPU whose threads can be halved; `num_threads` where they are not torch's own."""
    return device == "cpu" and (num_threads or torch.get_num_threads()) % _LANES == 0


def is_watched() -> bool:
    """True where something looks on at every operator, such as a counter of operations: it sees one thread alone."""
    return _get_current_dispatch_mode() is not None or _get_current_function_mode() is not None


def side_by_side(pieces: Sequence[Callable[[], Result]]) -> list[Result]:
    """What the pieces, at most two, return, in their order; the first runs in the thread of the caller.

    Each has half of the caller's threads, its grad mode and its context variables. Raises what the first piece that
    failed has raised, when both have ended.
    """
    if len(pieces) > _LANES:
        raise ValueError(f"{len(pieces)} pieces were given for {_LANES} lanes")
    num_threads, grad_enabled = torch.get_num_threads(), torch.is_grad_enabled()

    def run(piece: Callable[[], Result]) -> Result:
        torch.set_num_threads(max(1, num_threads // len(pieces)))
        with torch.set_grad_enabled(grad_enabled):
            return piece()

    others = [_worker().begin(contextvars.copy_context(), partial(run, piece)) for piece in pieces[1:]]
    try:
        results = [run(piece) for piece in pieces[:1]]
    finally:
        torch.set_num_threads(num_threads)
        for other in others:
            other.ended.wait()
    return results + [other.result() for other in others]


class _Task:
    """A piece in the other lane."""

    def __init__(self, context: contextvars.Context, piece: Callable[[], Any]) -> None:
        self.ended = threading.Event()
        self._context = context
        self._piece = piece
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """In the worker's thread."""
        try:
            self._result = self._context.run(self._piece)
        except BaseException as error:  # raised again in the caller's thread
            self._error = error
        self.ended.set()

    def result(self) -> Any:
        """Raises what the piece has raised."""
        if self._error is not None:
            raise self._error
        return self._result


class _Worker:
    """A thread that is kept, because a new one would begin with a new pool of OpenMP threads."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        # A daemon: a process that is told to leave does not wait for the end of an epoch.
        threading.Thread(target=self._work, name="second-lane", daemon=True).start()

    def begin(self, context: contextvars.Context, piece: Callable[[], Any]) -> _Task:
        """The piece as a task that has begun, or begins when the one before it has ended."""
        task = _Task(context, piece)
        self._tasks.put(task)
        return task

    def _work(self) -> None:
        while True:
            self._tasks.get().run()


_WORKERS: list[_Worker] = []
os.register_at_fork(after_in_child=_WORKERS.clear)  # threads stay behind in the parent


def _worker() -> _Worker:
    if not _WORKERS:
        _WORKERS.append(_Worker())
    return _WORKERS[0]
