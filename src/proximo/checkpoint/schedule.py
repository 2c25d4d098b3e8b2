"""When a run saves: by steps, by minutes, or both. Not the saving."""

import time
from collections.abc import Callable


class SaveSchedule:
    """Due at every multiple of `every_steps`, and once `every_minutes` passed since the last save; None: never.

    The clock, in seconds, starts with the schedule. When a run saves by time does not change what it computes.
    """

    def __init__(
        self,
        *,
        every_steps: int | None,
        every_minutes: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, or None; got {every_steps}")
        if every_minutes is not None and every_minutes <= 0:
            raise ValueError(f"every_minutes must be above 0, or None; got {every_minutes}")
        self._every_steps = every_steps
        self._every_minutes = every_minutes
        self._clock = clock
        self._last_save_seconds = clock()

    def due(self, step: int) -> bool:
        """Whether to save after this step."""
        by_steps = self._every_steps is not None and step % self._every_steps == 0
        seconds = self._clock() - self._last_save_seconds
        return by_steps or (self._every_minutes is not None and seconds >= 60 * self._every_minutes)

    def saved(self) -> None:
        """Tell the schedule that a save just ended, whatever caused it: the minutes count from here."""
        self._last_save_seconds = self._clock()
