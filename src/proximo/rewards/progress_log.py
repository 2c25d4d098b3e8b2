"""What is said while a source is waited for: shown in a run where its numbers are, else wherever logging puts it."""

import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

LOG = logging.getLogger("proximo.rewards")
TELL_EVERY_SECONDS = 10.0
"""How often a wait says what it waits for."""


def tell(name: str, answered: int, wanted: int, seconds: float) -> None:
    """One line: which source, how far it is, and for how long."""
    LOG.info("waiting for reward source %s: %d of %d answered in %.0f s", name, answered, wanted, seconds)


@contextmanager
def telling_of_start(name: str, what: str) -> Generator[None]:
    """A line every TELL_EVERY_SECONDS for as long as the block runs.

    A warning: before a run shows its numbers nothing less is seen.
    """
    start, over = time.monotonic(), threading.Event()

    def say() -> None:
        while not over.wait(TELL_EVERY_SECONDS):
            LOG.warning("reward source %s: waiting for %s since %.0f s", name, what, time.monotonic() - start)

    teller = threading.Thread(target=say, daemon=True, name=f"waiting-{name}")
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
