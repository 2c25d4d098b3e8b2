"""A lock that two threads take in turns: a loop that takes it again and again does not keep the other one waiting."""

import threading
from collections.abc import Generator
from contextlib import contextmanager


class Turns:
    """Who asks while somebody has the turn is next. A plain lock may go to its last holder for ever."""

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
