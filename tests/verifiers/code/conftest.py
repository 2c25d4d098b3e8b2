"""One sandbox for all tests of a file: starting it is what takes long."""

from collections.abc import Iterator

import pytest

from graded_programs import open_sandbox
from proximo_verifiers.sandbox.runner import Sandbox


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox() as opened:
        yield opened
