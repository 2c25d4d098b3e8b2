"""A piece of work for the pool, and its possible results."""

import threading
from dataclasses import dataclass, field
from typing import Any


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
