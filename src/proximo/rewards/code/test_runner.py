"""A program and its tests in two sandboxed processes, which can pass each other plain values and nothing else."""

import json
import secrets
import socket
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from proximo.errors import SandboxError
from proximo.rewards.code.harness_source import (
    program_that_serves,
    tests_that_are_rehearsed,
    tests_that_verifier,
    uses_random,
)
from proximo.rewards.code.inside.rpc_peer import GONE
from proximo.rewards.code.problems import TestSuite
from proximo.rewards.code.result import LIMITS_REACHED, Fault, Findings, ended_at, with_outcome
from proximo.sandbox.jobs import MIB, Limits, Program, Runner

CHANNEL: Final = 3
TESTS_CPU_SECONDS: Final = 20.0
"""CPU time of the tests themselves."""
SPARE_WALL_SECONDS: Final = 10.0
"""How much longer than the program the tests may take."""


def run_suite(runner: Runner, program: str, suite: TestSuite, *, before: str, limits: Limits) -> Findings:
    """What the tests say of the program.

    The program's process knows neither the tests nor what they expect, and has no descriptor but its end of the socket;
    grades are the standard output of the tests' process. Raises SandboxError where nothing can be run.
    """
    word = secrets.token_hex(8)
    seeded = uses_random(program + before)
    serving = program_that_serves(program, before=before, seeded=seeded)
    grading = tests_that_verifier(
        word,
        modules=suite.modules,
        names=suite.names,
        setup=suite.setup,
        tests=suite.tests,
        seeded=uses_random("\n".join((suite.setup, *suite.tests))),
    )
    tests_limits = Limits(
        cpu_seconds=TESTS_CPU_SECONDS, wall_seconds=limits.wall_seconds + SPARE_WALL_SECONDS, output_bytes=4 * MIB
    )
    with _socketpair() as (ours, theirs):
        job = runner.start(Program(source=serving, descriptors={CHANNEL: ours.fileno()}, limits=limits))
        try:
            asking = Program(source=grading, descriptors={CHANNEL: theirs.fileno()}, limits=tests_limits)
            tests = runner.start(asking, helps=job)
        except SandboxError:
            job.kill()
            job.wait()
            raise
    # The socket closes with either process, which ends the other one.
    grades = tests.wait()
    if all(line[0] in ("pass", "end") for line in _lines(grades.stdout, word)):
        # Nobody waits for a right program that will not end; how a wrong one ends is its reason.
        job.kill()
    outcome = job.wait()
    lines = list(_lines(grades.stdout, word))
    if not lines or lines[-1] != ["end"]:
        why = ended_at(grades, tests_limits) or "no grade"
        # Tests that hold for a right program reach a limit over what this one gives them: it must not pay to do so.
        fault = Fault.PROGRAM if grades.ending in LIMITS_REACHED else Fault.TESTS
        reason = f"the tests did not end by themselves: {why}"
        found = Findings(num_tests=len(suite.tests), fault=fault, reason=reason)
    else:
        found = _findings(lines, suite, ended_at(outcome, limits))
    return with_outcome(found, outcome, limits)


def rehearsed(runner: Runner, suite: TestSuite | None, *, before: str) -> str | None:
    """What no program could pass, of the tests and of the code that is put before it; None where nothing is found.

    Raises SandboxError where nothing can be run.
    """
    word = secrets.token_hex(8)
    source = tests_that_are_rehearsed(
        word,
        before=before,
        modules=suite.modules if suite else (),
        names=[here for here, _ in suite.names] if suite else [],
        setup=suite.setup if suite else "",
        tests=suite.tests if suite else (),
    )
    limits = Limits(output_bytes=4 * MIB)
    for what, *facts in _lines(runner.start(Program(source=source, limits=limits)).wait().stdout, word):
        match what, facts:
            case "import", [where, module]:
                return f"{where} imports {module}, which is not there: name what is installed under packages"
            case "compares", [where, kind]:
                return (
                    f"{where} compares what the program returns with a {kind}, which is no plain value: a program that "
                    "returns one fails. Have it compare texts or numbers that are made of both, or leave the row out"
                )
    return None


@contextmanager
def _socketpair() -> Generator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def _findings(lines: Sequence[list[Any]], suite: TestSuite, stopped: str | None) -> Findings:
    found = Findings(num_tests=len(suite.tests))
    match lines[0]:
        case ["program", "compile", why]:
            reason = f"the program cannot be compiled: {why}"
            return replace(found, compiled=False, ran=False, fault=Fault.PROGRAM, reason=reason)
        case ["program", _, why]:
            return replace(found, ran=False, fault=Fault.PROGRAM, reason=stopped or str(why))
        case ["setup", "fail", why] if suite.setup_uses_program:
            return replace(found, reason=f"the set-up of the tests failed: {why}")
        case ["setup", _, why]:
            return replace(found, fault=Fault.TESTS, reason=f"the set-up of the tests is broken: {why}")
    found = replace(found, num_passed=sum(line[0] == "pass" for line in lines))
    failed = next((line for line in lines if line[0] in ("fail", "broken")), None)
    return found if failed is None else _failed(found, failed, stopped)


def _failed(found: Findings, line: list[Any], stopped: str | None) -> Findings:
    what, number, why = line
    title = f"test {number + 1} of {found.num_tests}"
    if what == "broken":
        return replace(found, fault=Fault.TESTS, reason=f"{title} is broken: {why}")
    if why != GONE:
        return replace(found, reason=f"{title} failed: {why}")
    return replace(found, fault=Fault.PROGRAM, reason=f"{stopped or 'the program ended itself'} in {title}")


def _lines(stdout: bytes, word: str) -> Iterator[list[Any]]:
    for line in stdout.decode("ascii", "replace").splitlines():
        first, _, facts = line.partition(" ")
        if first == word:
            yield json.loads(facts)
