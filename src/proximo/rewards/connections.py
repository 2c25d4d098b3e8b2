"""Limits on the idle connections of a reward service, in time and number.

The token of a client is checked when the head of a request is complete. Opening connections without sending a head
costs an attacker almost nothing, so such a connection lives for HEAD_SECONDS at most, and is closed first when there
are too many.
"""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""Time for the head of a request to arrive, counted from the start of the connection or from its last reply."""
MAX_CONNECTIONS = 1000
BACKLOG = 16
"""Connections that the kernel queues, and that are accepted before any of them is counted."""
OTHER_DESCRIPTORS = 64
"""File descriptors reserved for workers, logs and models."""


def max_connections() -> int:
    """The number of connections that leaves file descriptors for everything else.

    A process without free descriptors can accept no connection at all.
    """
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_DESCRIPTORS - BACKLOG
    return min(MAX_CONNECTIONS, max(8, room))


class GuardedConnection(H11Protocol):
    """The HTTP/1.1 protocol of uvicorn, with a deadline for clients that have not sent the head of a request."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._max_connections = max_connections()
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Over the limit, closes the connection that has waited longest for a head: this one if no other waits."""
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) > self._max_connections:
            idle = [other for other in self.connections if isinstance(other, GuardedConnection) and other._deadline]
            min(idle, key=lambda other: other._deadline.when() if other._deadline else 0.0).end()

    def data_received(self, data: bytes) -> None:
        """Stops the deadline once a request is being handled. Bytes of a body that nobody reads do not count."""
        super().data_received(data)
        self._stop_waiting_at_work()

    def on_response_complete(self) -> None:
        """Restarts the deadline, since the next request may follow on the same connection."""
        self._wait_for_head()
        super().on_response_complete()
        self._stop_waiting_at_work()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the deadline, whichever side closed the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def end(self) -> None:
        """Closes the connection immediately, without a reply."""
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
