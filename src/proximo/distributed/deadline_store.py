"""A store whose calls have a deadline. Those of torch wait for ever for a stopped process or a lost machine."""

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch.distributed as dist

Answer = TypeVar("Answer")


class DeadlineStore:
    """The store calls that the heartbeats need. After one call without an answer, no later call waits.

    Each raises RuntimeError if no answer comes within `seconds`, else the error of the store.
    """

    def __init__(self, store: dist.Store, *, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._is_silent = False

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return self._answer(lambda: self._store.check(list(keys)))

    def get(self, key: str) -> bytes:
        """The value of an existing key."""
        return self._answer(lambda: self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of existing keys."""
        return self._answer(lambda: self._store.multi_get(list(keys)))

    def set(self, key: str, value: str) -> None:
        """Set a key, whether it exists or not."""
        self._answer(lambda: self._store.set(key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if it has the expected value, or is missing and "" is expected. Returns its value afterwards."""
        return self._answer(lambda: self._store.compare_set(key, expected, desired))

    def _answer(self, call: Callable[[], Answer]) -> Answer:
        answers: SimpleQueue[Answer | Exception] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put(call())
            except Exception as error:
                answers.put(error)

        try:
            if self._is_silent:
                raise Empty
            threading.Thread(target=ask, name="a call of the store", daemon=True).start()
            answer = answers.get(timeout=self._seconds)
        except Empty:
            self._is_silent = True
            raise RuntimeError(f"no answer within {self._seconds:g} s") from None
        if isinstance(answer, Exception):
            raise answer
        return answer
