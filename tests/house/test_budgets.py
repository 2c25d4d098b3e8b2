"""The size of the project stays within its limits (CONTRIBUTING.md, "Small is a feature")."""

import json
import subprocess
import sys

import pytest

from house import budgets
from house.budgets import AT_LEAST, LIMITS, is_beyond, lowered, over_limit


def test_no_figure_is_beyond_its_limit() -> None:
    """In a process of its own, which knows no trainer of other tests."""
    done = subprocess.run([sys.executable, budgets.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = {line[:52].rstrip() for line in done.stdout.splitlines()[1:]}
    assert printed == json.loads(LIMITS.read_text(encoding="utf-8")).keys()


def test_a_figure_beyond_its_limit_is_named() -> None:
    limit = json.loads(LIMITS.read_text(encoding="utf-8"))["src: lines"]["limit"]
    assert over_limit({"src: lines": limit}) == []
    assert over_limit({"src: lines": limit + 1}) == [f"src: lines: {limit + 1:g}, the limit is {limit:g}"]
    assert is_beyond(AT_LEAST, 0.14, 0.15)
    assert not is_beyond(AT_LEAST, 0.15, 0.15)


@pytest.mark.parametrize(
    ("now", "limit", "target", "wanted"),
    [
        (1000, 2000, 500, 1010),  # 1% of room
        (1000, 1005, 500, 1005),  # never raised
        (1000, None, None, 1010),
        (0, None, 500, None),  # there is nothing to hold yet
        (400, 2000, 500, 500),  # the target is enough
    ],
)
def test_limits_are_only_lowered(now: float, limit: float | None, target: float | None, wanted: float | None) -> None:
    assert lowered("src: lines", now, limit=limit, target=target) == wanted


def test_a_share_that_must_be_reached_is_raised_up_to_its_target() -> None:
    assert lowered(AT_LEAST, 0.2, limit=0.1, target=0.15) == 0.15
    assert lowered(AT_LEAST, 0.12, limit=0.1, target=0.15) == 0.118
