"""No test of remote rewards leaves a connection open."""

from collections.abc import Iterator

import pytest
from reward_services import OPENED


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()
