"""Pieces of work for the pool: their results, and their queue with retries after a back-off."""

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

FIRST_PAUSE_SECONDS = 0.05
"""Pause before the first retry. Each later pause is twice as long."""
LONGEST_PAUSE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The outcome of a request that the worker answered."""

    value: Any
    seconds: float
    """Wall-clock time of the answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedOut:
    """The work exceeded its time limit.

    It did so twice, the second time alone in a fresh worker; or it did so once, or gave up its turn, and the time of
    the whole step ended before it could be tried again.
    """

    seconds: float
    """The limit that was exceeded."""
    times: int = 2
    """Number of time-outs; 0 if the work gave up its turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The work was not answered because the worker or verifier failed."""

    reason: str


WorkResult = Done | TimedOut | Failed


@dataclass(eq=False, kw_only=True, slots=True)
class Work:
    """One request and its state in the pool. `done` is set once there is an `outcome`."""

    request: bytes
    """The encoded message."""
    outcome: WorkResult | None = None
    done: threading.Event = field(default_factory=threading.Event)
    failures: int = 0
    """Number of times its worker died or its verifier failed."""
    timeouts: int = 0
    is_wanted: bool = False
    """Somebody waits for its outcome."""
    is_postponed: bool = False
    """It would have made its verifier wait, and gave up its first turn."""
    not_before: float = 0.0
    """Monotonic time before which it is not retried."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def finish(self, outcome: WorkResult) -> None:
        """Sets the outcome. The first call wins; later calls from any thread change nothing."""
        with self._lock:
            if self.outcome is None:
                self.outcome = outcome
        self.done.set()


def backoff_seconds(failures: int) -> float:
    """Seconds to wait before a retry: exponential back-off."""
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (failures - 1))


class WorkQueue:
    """Work that somebody waits for comes before work that was only begun; else first in, first out. Failed work is
    retried after a pause.

    Work that took too long or gave up its turn is isolated: it comes after all other work, alone in a worker. If
    somebody waits for it, it comes before work that nobody waits for, so that the answers of a later step change
    nothing for those of this one.
    """

    def __init__(self) -> None:
        self._arrivals: deque[Work] = deque()
        self._waiting: deque[Work] = deque()
        self._isolated: deque[Work] = deque()
        self._paused: list[Work] = []
        self._is_unsorted = False

    def submit(self, work: Iterable[Work]) -> None:
        """Adds work. Any thread may call it."""
        self._arrivals.extend(work)

    def want(self, work: Iterable[Work]) -> None:
        """Marks work that somebody waits for. Any thread may call it."""
        for each in work:
            each.is_wanted = True
        self._is_unsorted = True

    def admit(self) -> None:
        """Moves new work, and work whose pause is over, to the waiting queue."""
        while self._arrivals:
            self._waiting.append(self._arrivals.popleft())
        now = time.monotonic()
        if any(work.not_before <= now for work in self._paused):
            self._waiting.extend(work for work in self._paused if work.not_before <= now)
            self._paused = [work for work in self._paused if work.not_before > now]
            self._is_unsorted = True
        if self._is_unsorted:
            self._is_unsorted = False
            self._waiting, self._isolated = (
                deque(sorted(queue, key=lambda work: not work.is_wanted)) for queue in (self._waiting, self._isolated)
            )

    def requeue(self, work: Iterable[Work]) -> None:
        """Puts dispatched work that no worker has begun back to the front, in this order."""
        self._waiting.extendleft(reversed(tuple(work)))
        self._is_unsorted = True

    def pause(self, work: Work) -> None:
        """Schedules failed work for a retry after its pause."""
        work.not_before = time.monotonic() + backoff_seconds(work.failures)
        self._paused.append(work)

    def put_isolated(self, work: Work) -> None:
        """Schedules work for a retry in isolation, when no other work waits."""
        self._isolated.append(work)
        self._is_unsorted = True

    def next(self) -> Work | None:
        """The next waiting work that has no outcome yet; None if there is none, or if isolated work comes first."""
        work = _first_open(self._waiting)
        return None if work is None or self._isolated_first(work) else self._waiting.popleft()

    def next_isolated(self) -> Work | None:
        """The next isolated work, once no other work waits that comes before it; None if there is none."""
        work = _first_open(self._waiting)
        if _first_open(self._isolated) is None or not (work is None or self._isolated_first(work)):
            return None
        return self._isolated.popleft()

    def _isolated_first(self, work: Work) -> bool:
        isolated = _first_open(self._isolated)
        return isolated is not None and isolated.is_wanted and not work.is_wanted

    def due(self) -> float | None:
        """Monotonic time at which the next pause ends; None if no work is paused."""
        return min((work.not_before for work in self._paused), default=None)

    def fail_all(self, reason: str) -> None:
        """Finishes all queued work as failed."""
        self.admit()
        for work in (*self._waiting, *self._isolated, *self._paused):
            work.finish(Failed(reason=reason))
        self._waiting.clear()
        self._isolated.clear()
        self._paused.clear()


def _first_open(queue: deque[Work]) -> Work | None:
    """The first work without an outcome, which stays in the queue; what is before it is removed."""
    while queue and queue[0].outcome is not None:
        queue.popleft()
    return queue[0] if queue else None
