"""The findings of running a program against its tests."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from proximo_verifiers.sandbox.jobs import Ending, Limits, Outcome

MAX_REASON = 200
"""Largest length of a reason, in characters."""
LIMITS_REACHED = frozenset({Ending.CPU, Ending.WALL, Ending.IDLE, Ending.MEMORY, Ending.OUTPUT, Ending.SCRATCH})
"""Endings of programs that exceeded a limit."""


class Fault(StrEnum):
    """The cause of an unsolved problem."""

    NONE = "none"
    """The program ran, and returned wrong results or raised in a test."""
    PROGRAM = "program"
    """The program does not compile, does not run to its end, or exceeded a limit."""
    TESTS = "tests"
    """The tests failed by themselves, or the sandbox did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The number of passed tests, and why the first other test failed."""

    num_tests: int
    num_passed: int = 0
    compiled: bool = True
    ran: bool = True
    """The program ran to its end, or to the point where tests call it."""
    fault: Fault = Fault.NONE
    reason: str | None = None
    by_clock: bool = False
    """A wall-clock limit ended the program."""
    kept_waiting: bool = False
    """The wall-clock limit may have been reached because the machine was busy, so that a second run is due."""

    @property
    def solved(self) -> bool:
        """True if every test passed."""
        return self.num_passed == self.num_tests and self.fault is not Fault.TESTS

    def because(self, reason: str) -> Self:
        """A copy with the reason, unless there is one already: the reason of the first failed test is kept."""
        return replace(self, reason=self.reason or reason[:MAX_REASON])


def with_outcome(findings: Findings, outcome: Outcome, limits: Limits) -> Findings:
    """The findings, changed if the program exceeded a limit.

    A limit counts even if every result had arrived before the program was stopped, because the order of the two events
    is a race: the last test then fails. A program that flooded its output passes no test, because it is not known in
    which test it wrote what.
    """
    if outcome.ending not in LIMITS_REACHED:
        return findings
    findings = stopped_by(outcome, findings)
    stopped = ended_at(outcome, limits) or ""
    if outcome.ending is Ending.OUTPUT:
        return replace(findings, num_passed=0, ran=False, reason=stopped)
    most = findings.num_tests - 1
    return replace(findings, num_passed=min(findings.num_passed, most)).because(
        f"{stopped} in test {most + 1} of {most + 1}"
    )


def stopped_by(outcome: Outcome, findings: Findings) -> Findings:
    """The findings of a program that exceeded a limit."""
    unsure = outcome.ending is Ending.IDLE and outcome.lost_seconds is None
    return replace(
        findings,
        fault=Fault.PROGRAM,
        by_clock=outcome.ending in (Ending.WALL, Ending.IDLE),
        kept_waiting=unsure or outcome.ending is Ending.WALL,
    )


def ended_at(outcome: Outcome, limits: Limits) -> str | None:
    """How a program ended, in a few words; None if it ran to its end with status 0."""
    if outcome.ending is Ending.EXIT:
        return f"exit status {outcome.status}" if outcome.status else None
    if outcome.ending is Ending.SIGNAL:
        return f"signal {outcome.status}"
    seconds = {Ending.CPU: limits.cpu_seconds, Ending.WALL: limits.wall_seconds, Ending.IDLE: limits.idle_seconds}
    amount = f" of {seconds[outcome.ending]:g} s" if outcome.ending in seconds else ""
    return outcome.ending.value.replace("_", " ") + amount


def printable(text: str) -> str:
    """The text with unprintable characters escaped, which could move the cursor of a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def last_line(text: bytes) -> str:
    """The last non-empty line, cut to 200 characters."""
    lines = text[-2000:].decode("utf-8", "replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")
