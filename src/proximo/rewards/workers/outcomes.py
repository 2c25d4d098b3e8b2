"""A piece of work for the pool and what can become of it. Not who does it."""

import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """It was answered."""

    value: Any
    seconds: float
    """Wall-clock time that the worker took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedOut:
    """Twice it took longer than its limit, then alone in a fresh worker; or once, or it gave up its turn, and after
    that all time was up."""

    seconds: float
    """The limit."""
    times: int = 2
    """How often it did; 0 where it gave up its turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """It was not answered, for a reason that lies with whoever should have."""

    reason: str


Outcome = Done | TimedOut | Failed


@dataclass(eq=False, kw_only=True, slots=True)
class Work:
    """One request. The pool fills it in; `done` is set when `outcome` is there."""

    request: bytes
    """Encoded."""
    outcome: Outcome | None = None
    done: threading.Event = field(default_factory=threading.Event)
    failures: int = 0
    """How often its worker died with it, or its verifier failed on it."""
    timeouts: int = 0
    is_postponed: bool = False
    """It made its verifier wait, and gave up its first turn."""
    not_before: float = 0.0
    """Monotonic time; a retry waits until then."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def finish(self, outcome: Outcome) -> None:
        """Say what became of it; the first word counts, whoever says it."""
        with self._lock:
            if self.outcome is None:
                self.outcome = outcome
        self.done.set()
