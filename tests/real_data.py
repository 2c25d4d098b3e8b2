"""The real data and the real model that some tests read."""

import os
from pathlib import Path

import pytest


def real_data(*parts: str) -> Path:
    """A file of the real data, or a skip with the reason where it is not at hand."""
    root = os.environ.get("PROXIMO_TEST_DATA")
    if not root:
        pytest.skip("PROXIMO_TEST_DATA is unset: the real data is not at hand")
    return Path(root, *parts)


def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct, or a skip with the reason where it is not at hand."""
    folder = os.environ.get("PROXIMO_TEST_MODEL")
    if not folder:
        pytest.skip("PROXIMO_TEST_MODEL is unset: the real model is not at hand (examples/real/smollm2.py makes it)")
    return Path(folder)
