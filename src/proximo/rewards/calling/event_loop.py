"""An event loop that lives as long as the async function that it runs. Imports no torch."""

import asyncio
import threading
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

CLOSE_SECONDS = 5.0
"""How long the end of its thread is waited for."""


class EventLoop:
    """Runs awaitables in one loop, in a thread of its own, which begins with the first of them.

    A client that an async function opens belongs to the loop that it was opened in, so the loop stays the same from
    batch to batch. Several threads may wait at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._end: asyncio.Future[None] | None = None

    def wait_for(self, awaitable: Awaitable[Any]) -> Any:
        """The result of the awaitable. Raises what it raises."""
        return asyncio.run_coroutine_threadsafe(_awaited(awaitable), self._started()).result()

    def close(self) -> None:
        """Cancels what still runs, and ends the thread. A later awaitable begins another one."""
        with self._lock:
            loop, thread, end = self._loop, self._thread, self._end
            self._loop = self._thread = self._end = None
        if loop is None or thread is None or end is None:
            return
        loop.call_soon_threadsafe(end.set_result, None)
        thread.join(CLOSE_SECONDS)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._end = self._loop.create_future()
                self._thread = threading.Thread(
                    target=_run, args=(self._loop, self._end), daemon=True, name="async-reward"
                )
                self._thread.start()
            return self._loop


def _run(loop: asyncio.AbstractEventLoop, end: "asyncio.Future[None]") -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        while not end.done():
            # Such an exception of a task reaches the waiting caller, and the loop too, which continues for others.
            with suppress(SystemExit, KeyboardInterrupt):
                runner.get_loop().run_until_complete(end)


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
