"""What is said while a source is waited for: shown in a run where its numbers are, else wherever logging puts it."""

import logging

LOG = logging.getLogger("proximo.rewards")
TELL_EVERY_SECONDS = 10.0
"""How often a wait says what it waits for."""


def tell(name: str, answered: int, wanted: int, seconds: float) -> None:
    """One line: which source, how far it is, and for how long."""
    LOG.info("waiting for reward source %s: %d of %d answered in %.0f s", name, answered, wanted, seconds)
