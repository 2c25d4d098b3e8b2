"""One piece of work in a thread, whose outcome is asked for later. Not what the work is."""

from collections.abc import Callable
from threading import Thread

from proximo.errors import RankError


class Background:
    """Begins at once. The thread does not keep the process alive: a rank that failed must end."""

    def __init__(self, work: Callable[[], None], *, what: str) -> None:
        self._what = what
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, args=(work,), name=what, daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised by `finish`
            self._error = error

    def finish(self, *, timeout_seconds: float) -> None:
        """Wait for the end of the work, and raise what it raised. RankError after `timeout_seconds`."""
        self._thread.join(min(timeout_seconds, 1e8))
        if self._thread.is_alive():
            raise RankError(
                f"{self._what} has not ended within {timeout_seconds:g} s: the disk is too slow for it, or a rank does "
                "not answer. devices.timeout_seconds is how long to wait"
            )
        if self._error is not None:
            raise self._error
