"""The files of real data that some tests read."""

import os
from pathlib import Path

import pytest


def real_data(*parts: str) -> Path:
    """A file of the real data, or a skip with the reason where it is not at hand."""
    root = os.environ.get("PROXIMO_TEST_DATA")
    if not root:
        pytest.skip("PROXIMO_TEST_DATA is unset: the real data is not at hand")
    return Path(root, *parts)
