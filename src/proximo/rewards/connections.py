"""Connections of a reward service that ask for nothing: how long they may stay, and how many. Not requests: service.py.

A token is looked at when the head of a request is whole. What comes before costs whoever sends it next to nothing, so a
connection without such a head has HEAD_SECONDS, and is the first to go when there are too many.
"""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""For the head of a request to arrive, counted from the connection's start or its last answer."""
MAX_CONNECTIONS = 1000
BACKLOG = 16
"""Connections that are taken in one go, before any of them is counted."""
OTHER_DESCRIPTORS = 64
"""For workers, logs and models."""


def most_connections() -> int:
    """As many as leave file descriptors for everything else; a process without any left can take nobody's call."""
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_DESCRIPTORS - BACKLOG
    return min(MAX_CONNECTIONS, max(8, room))


class GuardedConnection(H11Protocol):
    """HTTP/1.1 by uvicorn, with a deadline for whoever has not sent the head of a request."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._most = most_connections()
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Over the limit the one goes that has been without a head for longest; this one where all have one."""
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) > self._most:
            idle = [each for each in self.connections if isinstance(each, GuardedConnection) and each._deadline]
            min(idle, key=lambda each: each._deadline.when() if each._deadline else 0.0).end()

    def data_received(self, data: bytes) -> None:
        """More of a head, or of the body behind it. A body that nobody waits for is no sign of life."""
        super().data_received(data)
        self._stop_waiting_at_work()

    def on_response_complete(self) -> None:
        """The next request may follow on the same connection."""
        self._wait_for_head()
        super().on_response_complete()
        self._stop_waiting_at_work()

    def connection_lost(self, exc: Exception | None) -> None:
        """Also where it was this side that ended it."""
        self._stop_waiting()
        super().connection_lost(exc)

    def end(self) -> None:
        """At once, without a word."""
        self._stop_waiting()
        self.connections.discard(self)
        self.transport.abort()

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.end)

    def _stop_waiting_at_work(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
