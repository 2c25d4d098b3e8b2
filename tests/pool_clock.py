"""The clock of a pool of workers, which passes a limit when a test says so and never else."""

import time
from collections.abc import Callable
from pathlib import Path


class PoolClock:
    """Stands in for `time` in a module. With each of `jumps` it is so many seconds later, once its condition is true.

    A limit of minutes is thus exceeded at once by what hangs, and never by what is only slow.
    """

    sleep = staticmethod(time.sleep)

    def __init__(self, *jumps: tuple[Callable[[], bool], float]) -> None:
        self._jumps = [*jumps]
        self._later_seconds = 0.0

    def monotonic(self) -> float:
        if self._jumps and self._jumps[0][0]():
            self._later_seconds += self._jumps.pop(0)[1]
        return time.monotonic() + self._later_seconds


def hangs(place: Path, times: int) -> Callable[[], bool]:
    """Whether workers have begun so many times on what never ends: each wrote one byte to `place`."""
    return lambda: place.exists() and place.stat().st_size >= times
