"""Whether the Hub answers, asked once: without a network its libraries try again for a minute. Loads nothing."""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

from proximo.local_or_hub import is_local

ANSWER_SECONDS = 5.0
"""How long the Hub may take to answer at all."""
HOLDS_SECONDS = 60.0
"""For how long it is not asked again."""
_asked: dict[str, tuple[float, bool]] = {}
"""By address: when it was asked, and whether it answered."""


@contextmanager
def within_reach(name: str) -> Generator[None]:
    """Within it, what is loaded under a name of the Hub comes from the cache alone where the Hub does not answer."""
    if is_local(name) or _answers():
        yield
        return
    from huggingface_hub import constants

    switches = [(constants, "HF_HUB_OFFLINE")]
    if "datasets" in sys.modules:
        switches.append((sys.modules["datasets"].config, "HF_HUB_OFFLINE"))
    before = [getattr(module, switch) for module, switch in switches]
    for module, switch in switches:
        setattr(module, switch, True)
    try:
        yield
    finally:
        for (module, switch), value in zip(switches, before, strict=True):
            setattr(module, switch, value)


def _answers() -> bool:
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return True  # the user said so: the libraries need no help
    at, answered = _asked.get(constants.ENDPOINT, (float("-inf"), True))
    if time.monotonic() - at > HOLDS_SECONDS:
        try:
            get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
            answered = True
        except Exception:  # of the client's library, which is another in other versions; any status is an answer
            answered = False
        _asked[constants.ENDPOINT] = (time.monotonic(), answered)
    return answered
