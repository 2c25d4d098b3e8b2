"""A reward that can be held up: a run that a test stops is then where the test wants it, however fast it is."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tiny_runs

GATE = "PROXIMO_TEST_GATE"
"""Variable with the path for which the reward waits, from its `FREE_CALLS` on."""
FREE_CALLS = 5
NUM_CALLS = [0]


def share_of_vowels(
    prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[float]:
    NUM_CALLS[0] += 1
    while NUM_CALLS[0] > FREE_CALLS and GATE in os.environ and not Path(os.environ[GATE]).exists():
        time.sleep(0.01)
    return tiny_runs.share_of_vowels(prompts, responses, metadata)
