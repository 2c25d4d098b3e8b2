"""Log messages about waiting for reward sources and environments."""

import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

LOG = logging.getLogger("proximo_verifiers")
LOG_EVERY_SECONDS = 10.0
"""Interval between messages about one wait."""


def log_progress(name: str, answered: int, wanted: int, seconds: float) -> None:
    """Logs how many of the wanted responses a source has answered after so many seconds."""
    LOG.info("waiting for reward source %s: %d of %d answered in %.0f s", name, answered, wanted, seconds)


@contextmanager
def logging_start(who: str, what: str) -> Generator[None]:
    """Logs every LOG_EVERY_SECONDS that `who`, such as "reward source maths", waits for `what`, while the block runs.

    The messages are warnings, because lower levels are not shown before a run shows its progress.
    """
    start, over = time.monotonic(), threading.Event()

    def log() -> None:
        while not over.wait(LOG_EVERY_SECONDS):
            LOG.warning("%s: waiting for %s since %.0f s", who, what, time.monotonic() - start)

    logger = threading.Thread(target=log, daemon=True, name=f"waiting-{who}")
    logger.start()
    try:
        yield
    finally:
        over.set()
        logger.join()
