"""What waits to be done, and in which order. Not who does it."""

import time
from collections import deque
from collections.abc import Iterable

from proximo.rewards.workers.outcomes import Failed, Work

FIRST_PAUSE_SECONDS = 0.05
"""Before the first retry; each one after it waits twice as long."""
LONGEST_PAUSE_SECONDS = 5.0


def backoff_seconds(failures: int) -> float:
    """Seconds before the next try: exponential back-off."""
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (failures - 1))


class WorkQueue:
    """First come, first served; what failed pauses, and what took too long or gave up its turn comes last, alone."""

    def __init__(self) -> None:
        self._arrivals: deque[Work] = deque()
        self._waiting: deque[Work] = deque()
        self._isolated: deque[Work] = deque()
        self._paused: list[Work] = []

    def submit(self, work: Iterable[Work]) -> None:
        """The only method that any thread may call."""
        self._arrivals.extend(work)

    def admit(self) -> None:
        """Let in what arrived, and what has paused long enough."""
        while self._arrivals:
            self._waiting.append(self._arrivals.popleft())
        now = time.monotonic()
        if any(work.not_before <= now for work in self._paused):
            self._waiting.extend(work for work in self._paused if work.not_before <= now)
            self._paused = [work for work in self._paused if work.not_before > now]

    def requeue(self, work: Iterable[Work]) -> None:
        """To the front, in this order: it was handed out, and nobody had begun with it."""
        self._waiting.extendleft(reversed(tuple(work)))

    def pause(self, work: Work) -> None:
        """It failed, and is tried again later."""
        work.not_before = time.monotonic() + backoff_seconds(work.failures)
        self._paused.append(work)

    def put_isolated(self, work: Work) -> None:
        """It is tried again when the rest has been handed out."""
        self._isolated.append(work)

    def next(self) -> Work | None:
        """The next that nobody has given up; None where none waits."""
        return _first_open(self._waiting)

    def next_isolated(self) -> Work | None:
        """Of those that are to be alone."""
        return None if self._waiting else _first_open(self._isolated)

    def due(self) -> float | None:
        """Monotonic time at which a pause ends; None where nothing pauses."""
        return min((work.not_before for work in self._paused), default=None)

    def fail_all(self, reason: str) -> None:
        """Nothing that waits will be done."""
        self.admit()
        for work in (*self._waiting, *self._isolated, *self._paused):
            work.finish(Failed(reason=reason))
        self._waiting.clear()
        self._isolated.clear()
        self._paused.clear()


def _first_open(line: deque[Work]) -> Work | None:
    while line:
        work = line.popleft()
        if work.outcome is None:
            return work
    return None
