"""Runs a program and its tests in two sandboxed processes that exchange plain values only.

Each process runs a source of a few lines: one call of a harness function that the sandbox has preloaded.
"""

import json
import re
import secrets
import socket
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from proximo_verifiers.code.inside.rpc_peer import GONE
from proximo_verifiers.code.parsed_asserts import ParsedAssert
from proximo_verifiers.code.problems import TestSuite
from proximo_verifiers.code.result import LIMITS_REACHED, Fault, Findings, ended_at, with_outcome
from proximo_verifiers.errors import SandboxError
from proximo_verifiers.sandbox.jobs import MIB, Limits, Program, Runner

CHANNEL: Final = 3
TESTS_CPU_SECONDS: Final = 20.0
"""CPU limit of the tests themselves."""
SPARE_WALL_SECONDS: Final = 10.0
"""Wall-clock time that the tests may take beyond that of the program."""
INSIDE: Final = "proximo_verifiers.code.inside"
PRELOAD: Final = (f"{INSIDE}.program_process", f"{INSIDE}.tests_process")
"""Modules that the sandbox preloads, because programs cannot read the files of this package."""
RANDOM: Final = re.compile(r"\brandom\b")


def run_suite(runner: Runner, program: str, suite: TestSuite, *, before: str, limits: Limits) -> Findings:
    """Runs the tests against the program.

    The program's process knows neither the tests nor the expected values, and its only extra descriptor is its end of
    the socket. The results are the standard output of the tests' process. Raises SandboxError if nothing can be run.
    """
    word = secrets.token_hex(8)
    seeded = uses_random(program + before)
    serving = serving_source(program, before=before, seeded=seeded)
    testing = tests_source(
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
            tests_program = Program(source=testing, descriptors={CHANNEL: theirs.fileno()}, limits=tests_limits)
            tests = runner.start(tests_program, helps=job)
        except SandboxError:
            job.kill()
            job.wait()
            raise
    # The end of either process closes the socket, which ends the other process.
    tests_outcome = tests.wait()
    if all(line[0] in ("pass", "end") for line in _lines(tests_outcome.stdout, word)):
        # Kill a correct program that does not end. Let a failing one end, since how it ends is the reason.
        job.kill()
    outcome = job.wait()
    lines = list(_lines(tests_outcome.stdout, word))
    if not lines or lines[-1] != ["end"]:
        why = ended_at(tests_outcome, tests_limits) or "no result"
        # Tests reach a limit because of the values that the program gives them, so the program is at fault.
        fault = Fault.PROGRAM if tests_outcome.ending in LIMITS_REACHED else Fault.TESTS
        reason = f"the tests did not end by themselves: {why}"
        findings = Findings(num_tests=len(suite.tests), fault=fault, reason=reason)
    else:
        findings = _findings(lines, suite, ended_at(outcome, limits))
    return with_outcome(findings, outcome, limits)


def rehearsed(runner: Runner, suite: TestSuite | None, *, before: str) -> str | None:
    """The reason why no program can pass these tests, or why `before` fails; None if no problem is found.

    Raises SandboxError if nothing can be run.
    """
    word = secrets.token_hex(8)
    source = rehearsal_source(
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
                return f"{where} imports {module}, which the sandbox lacks: add an installed package to packages"
            case "compares", [where, kind]:
                return (
                    f"{where} compares the result of the program with a {kind}, which is not a plain value and cannot "
                    "be returned. Compare texts or numbers made from both, or leave the row out"
                )
    return None


@contextmanager
def _socketpair() -> Generator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def _findings(lines: Sequence[list[Any]], suite: TestSuite, stopped: str | None) -> Findings:
    findings = Findings(num_tests=len(suite.tests))
    match lines[0]:
        case ["program", "compile", why]:
            reason = f"the program cannot be compiled: {why}"
            return replace(findings, compiled=False, ran=False, fault=Fault.PROGRAM, reason=reason)
        case ["program", _, why]:
            return replace(findings, ran=False, fault=Fault.PROGRAM, reason=stopped or str(why))
        case ["setup", "fail", why] if suite.setup_uses_program:
            return replace(findings, reason=f"the set-up of the tests failed: {why}")
        case ["setup", _, why]:
            return replace(findings, fault=Fault.TESTS, reason=f"the set-up of the tests is broken: {why}")
    findings = replace(findings, num_passed=sum(line[0] == "pass" for line in lines))
    failed = next((line for line in lines if line[0] in ("fail", "broken")), None)
    return findings if failed is None else _failed(findings, failed, stopped)


def _failed(findings: Findings, line: list[Any], stopped: str | None) -> Findings:
    what, number, why = line
    title = f"test {number + 1} of {findings.num_tests}"
    if what == "broken":
        return replace(findings, fault=Fault.TESTS, reason=f"{title} is broken: {why}")
    if why != GONE:
        return replace(findings, reason=f"{title} failed: {why}")
    return replace(findings, fault=Fault.PROGRAM, reason=f"{stopped or 'the program ended itself'} in {title}")


def _lines(stdout: bytes, word: str) -> Iterator[list[Any]]:
    for line in stdout.decode("ascii", "replace").splitlines():
        first, _, facts = line.partition(" ")
        if first == word:
            yield json.loads(facts)


def serving_source(program: str, *, before: str, seeded: bool) -> str:
    """Source that runs `before` and the program, and answers calls of its functions on descriptor 3."""
    return _call("program_process", "serve", repr(program), before=before, seeded=seeded)


def calling_source(program: str, name: str, calls: Sequence[Any], *, before: str, seeded: bool) -> str:
    """Source that runs `before` and the program, calls a function with each of `calls`, and writes to descriptor 3."""
    parameters = map(repr, (program, name, json.dumps(calls)))
    return _call("program_process", "call_each", *parameters, before=before, seeded=seeded)


def tested_source(program: str, tests: Sequence[ParsedAssert], *, before: str, seeded: bool) -> str:
    """Source that runs `before` and the program, and makes the calls of `tests`.

    It contains neither the expected values nor the messages of the tests.
    """
    calls = "".join(f"({test.name!r}, {test.function!r}, {test.arguments}), " for test in tests)
    return _call("program_process", "call_as_tested", repr(program), f"[{calls}]", before=before, seeded=seeded)


def tests_source(word: str, **facts: Any) -> str:
    """Source that runs tests against the program behind descriptor 3, and prints results in lines that begin with
    `word`."""
    return _call("tests_process", "run_tests", repr(word), **facts)


def rehearsal_source(word: str, **facts: Any) -> str:
    """Source that runs tests without a program, and prints their problems in lines that begin with `word`."""
    return _call("tests_process", "rehearse", repr(word), **facts)


def uses_random(source: str) -> bool:
    """True if the source mentions `random`; its generator is then seeded, so that a program has one grade."""
    return RANDOM.search(source) is not None


def _call(module: str, function: str, *arguments: str, **keywords: Any) -> str:
    """`arguments` are Python source, `keywords` are values."""
    parameters = ", ".join([*arguments, *(f"{name}={value!r}" for name, value in keywords.items())])
    return f"from {INSIDE}.{module} import {function}\n{function}({parameters})\n"
