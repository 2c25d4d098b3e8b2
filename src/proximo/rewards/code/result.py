"""What came of running a program on its tests. Not what that is worth: that is verifier.py."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from proximo.sandbox.jobs import Ending, Limits, Outcome

MAX_REASON = 200
"""Characters."""
LIMITS_REACHED = frozenset({Ending.CPU, Ending.WALL, Ending.IDLE, Ending.MEMORY, Ending.OUTPUT, Ending.SCRATCH})
"""Endings of a program that used more than it may."""


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
    by_clock: bool = False
    """A limit of wall-clock time ended it."""
    kept_waiting: bool = False
    """It was that of a machine with too much to do, or of one that does not say how much it has to do."""

    @property
    def solved(self) -> bool:
        """Every test passed."""
        return self.num_passed == self.num_tests and self.fault is not Fault.TESTS

    def because(self, reason: str) -> Self:
        """With a reason, where there is none yet: that of the first test that failed is kept."""
        return replace(self, reason=self.reason or reason[:MAX_REASON])


def with_outcome(found: Findings, outcome: Outcome, limits: Limits) -> Findings:
    """What is found with the limit that the program exceeded, also where every result had come before it was stopped:
    which of the two was first, nobody knows.

    How much it had written when it was in which test depends on who reads: a flood passes no test.
    """
    if outcome.ending not in LIMITS_REACHED:
        return found
    found = stopped_by(outcome, found)
    stopped = ended_at(outcome, limits) or ""
    if outcome.ending is Ending.OUTPUT:
        return replace(found, num_passed=0, ran=False, reason=stopped)
    most = found.num_tests - 1
    return replace(found, num_passed=min(found.num_passed, most)).because(f"{stopped} in test {most + 1} of {most + 1}")


def stopped_by(outcome: Outcome, found: Findings) -> Findings:
    """The findings on a program that exceeded a limit."""
    unsure = outcome.ending is Ending.IDLE and outcome.lost_seconds is None
    return replace(
        found,
        fault=Fault.PROGRAM,
        by_clock=outcome.ending in (Ending.WALL, Ending.IDLE),
        kept_waiting=unsure or outcome.ending is Ending.WALL,
    )


def ended_at(outcome: Outcome, limits: Limits) -> str | None:
    """How a program ended that did not run to its end, in a few words; None for one that did."""
    if outcome.ending is Ending.EXIT:
        return f"exit status {outcome.status}" if outcome.status else None
    if outcome.ending is Ending.SIGNAL:
        return f"signal {outcome.status}"
    seconds = {Ending.CPU: limits.cpu_seconds, Ending.WALL: limits.wall_seconds, Ending.IDLE: limits.idle_seconds}
    amount = f" of {seconds[outcome.ending]:g} s" if outcome.ending in seconds else ""
    return outcome.ending.value.replace("_", " ") + amount


def printable(text: str) -> str:
    """The text, with escapes for what could move a terminal's cursor or break a line."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def last_line(text: bytes) -> str:
    """The last line that is not empty, cut to a readable length."""
    lines = text[-2000:].decode("utf-8", "replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
