"""Runs functions in threads that do not keep the process alive, unlike those of `concurrent.futures`: a function of the
user may hang, and a rank that failed must end.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def in_background(work: Callable[[], Result], *, name: str) -> Future[Result]:
    """Begin to run a function in a thread of that name. Returns its result to come."""
    return all_in_background([work], at_once=1, name=name)[0]


def all_in_background(works: Sequence[Callable[[], Result]], *, at_once: int, name: str) -> list[Future[Result]]:
    """Begin to run functions, in their order and at most `at_once` at the same time. Returns their results to come."""
    futures: list[Future[Result]] = [Future() for _ in works]
    waiting: SimpleQueue[tuple[Callable[[], Result], Future[Result]]] = SimpleQueue()
    for pair in zip(works, futures, strict=True):
        waiting.put(pair)

    def run() -> None:
        while True:
            try:
                work, future = waiting.get_nowait()
            except Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # raised by `future.result`
                future.set_exception(error)

    for _ in works[:at_once]:
        Thread(target=run, name=name, daemon=True).start()
    return futures
