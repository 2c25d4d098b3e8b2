"""Ranks that all tests of a module share."""

from collections.abc import Iterator

import pytest

from distributed.ranks import Ranks, ranks_of


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks_of(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with ranks_of(3) as ranks:
        yield ranks
