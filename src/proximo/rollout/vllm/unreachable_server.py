"""The time for which a vLLM server cannot be reached (a restart), and log messages about the wait."""

import logging
import threading
import time

LOG = logging.getLogger("proximo.rollout")
SAY_EVERY_SECONDS = 60.0


class Absence:
    """The absence of one server. It ends when the server answers. Thread-safe."""

    def __init__(self, url: str, *, seconds: float) -> None:
        """`seconds`: the longest wait."""
        self._url = url
        self._seconds = seconds
        self._since: float | None = None
        self._said = 0.0
        self._lock = threading.Lock()

    def noticed(self, reason: str) -> None:
        """Note that a request reached no server. Logs the wait, and again each minute."""
        with self._lock:
            now = time.monotonic()
            if self._since is None:
                self._since, self._said = now, -SAY_EVERY_SECONDS
            away = now - self._since
            if away < self._said + SAY_EVERY_SECONDS:
                return
            self._said = away
        LOG.warning(
            "the vLLM server %s has not been reachable for %.0f s (%s): waiting for it, at most %g s "
            "(engine.start_seconds)",
            *(self._url, away, reason, self._seconds),
        )

    def ended(self) -> None:
        """Note that the server answers. The next absence starts at 0 again."""
        with self._lock:
            since, self._since = self._since, None
        if since is not None:
            LOG.warning("the vLLM server %s answers again after %.0f s", self._url, time.monotonic() - since)

    @property
    def is_under_way(self) -> bool:
        """Whether the last request reached no server."""
        return self._since is not None

    @property
    def is_too_long(self) -> bool:
        """Whether it has lasted as long as the longest wait."""
        since = self._since
        return since is not None and time.monotonic() - since >= self._seconds
