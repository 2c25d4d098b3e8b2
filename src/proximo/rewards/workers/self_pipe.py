"""Wakes a thread that waits in a selector, from any other thread. Carries nothing."""

import os
import threading
from contextlib import suppress


class SelfPipe:
    """A pipe to itself. Its descriptors may be somebody else's once it is closed, so it never rings then."""

    def __init__(self) -> None:
        self.descriptor, self._push = os.pipe()
        """Readable when somebody rang."""
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._push, False)
        self._lock = threading.Lock()
        self._is_closed = False

    def wake(self) -> None:
        """From any thread, also when nobody listens any more."""
        with self._lock, suppress(BlockingIOError):  # a full pipe wakes as well
            if not self._is_closed:
                os.write(self._push, b"!")

    def drain(self) -> None:
        """Until the next time."""
        with suppress(BlockingIOError):
            while os.read(self.descriptor, 4096):
                pass

    def close(self) -> None:
        """When the thread that waited has ended."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.descriptor)
                os.close(self._push)
