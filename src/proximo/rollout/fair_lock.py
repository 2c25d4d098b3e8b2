"""A fair lock for two threads: a thread that takes it in a loop does not keep the other one waiting."""

import threading
from collections.abc import Generator
from contextlib import contextmanager


class FairLock:
    """The fair lock. The waiting thread gets it next, while a plain lock may always return to its last holder."""

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._now = threading.Lock()

    @contextmanager
    def turn(self) -> Generator[None]:
        """Inside, no other thread has a turn."""
        with self._next:
            self._now.acquire()
        try:
            yield
        finally:
            self._now.release()
