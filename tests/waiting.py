"""Waits of tests: for what must become true, however slow the machine is. No result depends on how long they took."""

import time
from collections.abc import Callable

LATEST_SECONDS = 300.0
"""Only what hangs takes so long: it is also the deadline of threads and processes that tests wait for."""


def wait_until(holds: Callable[[], object], what: str = "what was waited for") -> None:
    """Wait until the condition is true. Raises AssertionError if it never becomes true."""
    deadline = time.monotonic() + LATEST_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come within {LATEST_SECONDS:g} s"
        time.sleep(0.002)
