"""Wakes a thread that waits in a selector, from any other thread (the self-pipe trick)."""

import os
import threading
from contextlib import suppress


class SelfPipe:
    """A pipe whose reading end is in the selector.

    Once it is closed the system may reuse its descriptors, so `wake` writes nothing then.
    """

    def __init__(self) -> None:
        self.descriptor, self._writer = os.pipe()
        """Readable after `wake`."""
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writer, False)
        self._lock = threading.Lock()
        self._is_closed = False

    def wake(self) -> None:
        """Wakes the waiting thread. May be called from any thread, also after `close`."""
        with self._lock, suppress(BlockingIOError):  # a full pipe is readable already
            if not self._is_closed:
                os.write(self._writer, b"!")

    def drain(self) -> None:
        """Empties the pipe, so that the selector waits again."""
        with suppress(BlockingIOError):
            while os.read(self.descriptor, 4096):
                pass

    def close(self) -> None:
        """Closes the pipe. To be called when the waiting thread has ended."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.descriptor)
                os.close(self._writer)
