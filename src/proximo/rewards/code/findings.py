"""What came of running a program on its tests. Not what that is worth: that is judge.py."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from proximo.sandbox.jobs import Ending, Limits, Outcome

MAX_REASON = 200
"""Characters."""


class Fault(StrEnum):
    """Who is to blame for a problem that is not solved."""

    NONE = "none"
    """The program ran and gave wrong results, or raised where a test called it."""
    PROGRAM = "program"
    """It cannot be compiled, does not run to its end, or used more than it may."""
    TESTS = "tests"
    """The tests failed by themselves, or the sandbox did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The tests that passed, and why the first of the others did not."""

    num_tests: int
    num_passed: int = 0
    compiled: bool = True
    ran: bool = True
    """The program came to its end, or to where its tests call it."""
    fault: Fault = Fault.NONE
    reason: str | None = None
    at_wall_limit: bool = False

    @property
    def solved(self) -> bool:
        """Every test passed."""
        return self.num_passed == self.num_tests and self.fault is not Fault.TESTS

    def because(self, reason: str) -> Self:
        """With a reason, where there is none yet: that of the first test that failed is kept."""
        return replace(self, reason=self.reason or reason[:MAX_REASON])


def ended_at(outcome: Outcome, limits: Limits) -> str | None:
    """How a program ended that did not run to its end, in a few words; None for one that did."""
    if outcome.ending is Ending.EXIT:
        return f"exit status {outcome.status}" if outcome.status else None
    if outcome.ending is Ending.SIGNAL:
        return f"signal {outcome.status}"
    amount = {Ending.CPU: f" of {limits.cpu_seconds:g} s", Ending.WALL: f" of {limits.wall_seconds:g} s"}
    return outcome.ending.value.replace("_", " ") + amount.get(outcome.ending, "")


def printable(text: str) -> str:
    """The text, with escapes for what could move a terminal's cursor or break a line."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def last_line(text: bytes) -> str:
    """The last line that is not empty, cut to a readable length."""
    lines = text[-2000:].decode("utf-8", "replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
