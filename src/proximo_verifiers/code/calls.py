"""Calls functions of a program in the sandbox and compares the results outside, where the expected values stay."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from io import RawIOBase
from select import select
from threading import Thread
from typing import Any, Final

from proximo_verifiers.code.inside.codec import ValueDecoder, ValueRefusedError
from proximo_verifiers.code.inside.rpc_peer import BROKE, MAX_BYTES, Message, NotPlainError, parsed
from proximo_verifiers.code.parsed_asserts import ParsedAssert
from proximo_verifiers.code.problems import Calls
from proximo_verifiers.code.result import MAX_REASON, Fault, Findings, ended_at, with_outcome
from proximo_verifiers.code.stdio import same_value
from proximo_verifiers.code.test_runner import calling_source, tested_source, uses_random
from proximo_verifiers.sandbox.jobs import Ending, Job, Limits, Outcome, Program, Runner

CHANNEL: Final = 3
MAX_RESULTS_BYTES: Final = MAX_BYTES
LEAVE_SECONDS: Final = 0.5
"""Time for a program to end after it has written all results."""
Check = Callable[[Message], str | None]
"""Returns why a result is not the expected one, or None if it is."""


def run_calls(
    runner: Runner, program: str, problem: Calls, *, before: str, limits: Limits, tolerance: float | None
) -> Findings:
    """Runs the program once, calls its function with each list of arguments, and compares what it returns.

    Raises SandboxError if nothing can be run.
    """
    source = calling_source(
        program, problem.function, problem.arguments, before=before, seeded=uses_random(program + before)
    )
    return _run(runner, source, [partial(_check_value, expected, tolerance) for expected in problem.expected], limits)


def run_comparisons(
    runner: Runner, program: str, tests: Sequence[ParsedAssert], *, before: str, limits: Limits
) -> Findings:
    """Runs the program once, calls its functions as the tests do, and compares what they return.

    Raises SandboxError if nothing can be run.
    """
    source = tested_source(program, tests, before=before, seeded=uses_random(program + before))
    return _run(runner, source, [partial(_check_assert, test) for test in tests], limits)


def _run(runner: Runner, source: str, tests: Sequence[Check], limits: Limits) -> Findings:
    outcome, written = _outcome_and_results(runner, source, limits, num_messages=1 + len(tests))
    stopped = ended_at(outcome, limits) if outcome.ending is not Ending.KILLED else None
    return with_outcome(_findings(_messages(written), tests, stopped), outcome, limits)


def _findings(messages: Iterator[Message], tests: Sequence[Check], stopped: str | None) -> Findings:
    findings = Findings(num_tests=len(tests))
    match next(messages, None):
        case ["failed", "compile", str(why)]:
            reason = f"the program cannot be compiled: {why}"
            return replace(findings, compiled=False, ran=False, fault=Fault.PROGRAM, reason=reason[:MAX_REASON])
        case ["failed", _, str(why)]:
            return replace(findings, ran=False, fault=Fault.PROGRAM, reason=why[:MAX_REASON])
        case ["ready"]:
            return _compared(findings, messages, tests, stopped)
    return replace(findings, ran=False, fault=Fault.PROGRAM, reason=stopped or "the program ended itself")


def _compared(findings: Findings, messages: Iterator[Message], tests: Sequence[Check], stopped: str | None) -> Findings:
    """Decodes and compares one message at a time, since each may be large."""
    for number, check in enumerate(tests):
        title = f"test {number + 1} of {findings.num_tests}"
        message = next(messages, None)
        if message is None:
            return replace(findings.because(f"{stopped or 'the program ended itself'} in {title}"), fault=Fault.PROGRAM)
        why = check(message)
        passed = replace(findings, num_passed=findings.num_passed + 1)
        findings = passed if why is None else findings.because(f"{title} failed: {why}")
    return findings


def _outcome_and_results(runner: Runner, source: str, limits: Limits, *, num_messages: int) -> tuple[Outcome, bytes]:
    """The outcome of the program, and what it wrote to the channel, up to a limit."""
    reading, writing = os.pipe()
    written = bytearray()
    with open(reading, "rb", buffering=0) as pipe:
        try:
            job = runner.start(Program(source=source, descriptors={CHANNEL: writing}, limits=limits))
        finally:
            os.close(writing)
        thread = Thread(target=_read, args=(pipe, written, num_messages, job), daemon=True)
        thread.start()
        try:
            outcome = job.wait()
        finally:
            thread.join()
    return outcome, bytes(written)


def _read(pipe: RawIOBase, written: bytearray, num_messages: int, job: Job) -> None:
    with pipe:
        end = 0
        while len(written) < MAX_RESULTS_BYTES and (part := pipe.read(2**16)):
            written += part
            while num_messages and (following := _end_of_message(written, end)) is not None:
                end = following
                num_messages -= 1
            if not num_messages:
                # All results are there: kill a program that does not end, or keeps writing.
                if not select([pipe], [], [], LEAVE_SECONDS)[0] or pipe.read(1):
                    job.kill()
                return


def _end_of_message(written: bytes | bytearray, start: int) -> int | None:
    """The end of the message that begins at `start`; None if it is incomplete."""
    end = start + 4 + int.from_bytes(written[start : start + 4], "big")
    return end if start + 4 <= len(written) and end <= len(written) else None


def _messages(written: bytes) -> Iterator[Message]:
    """The messages, up to the first invalid one."""
    start = 0
    while (end := _end_of_message(written, start)) is not None:
        message = parsed(written[start + 4 : end]) if end - start - 4 <= MAX_BYTES else None
        if message is None:
            return
        yield message
        start = end


def _check_value(expected: Any, tolerance: float | None, message: Message) -> str | None:
    """A `Check` of a JSON value."""
    try:
        kind, _, tree = message
        value = ValueDecoder([], _no_object, {}).value(tree)
    except (ValueRefusedError, ValueError, RecursionError, NotPlainError) as error:
        return f"the result is not a plain value: {error}"
    if kind == "value":
        # Some data sets wrap a single result in a list.
        wrapped = isinstance(expected, list) and len(expected) == 1
        candidates = (expected, expected[0]) if wrapped else (expected,)
        correct = any(same_value(value, candidate, tolerance=tolerance) for candidate in candidates)
        return None if correct else "another result"
    # Only texts are quoted: nested lists that share parts could have a huge representation.
    match kind, value:
        case "raised", (type(), _):
            return value[0].__name__
        case "raised", (str(name), _):
            return name[:100]
        case "refused", str(why):
            return f"the result is not a plain value: {why[:100]}"
    return BROKE


def _check_assert(test: ParsedAssert, message: Message) -> str | None:
    """A `Check` of an assert: returns what the assert would raise."""
    try:
        kind, _, tree = message
        value = ValueDecoder([], _no_object, {}).value(tree)
    except (ValueRefusedError, ValueError, RecursionError, NotPlainError) as error:
        return str(error) if isinstance(error, NotPlainError) else f"the program's value was refused: {error}"
    match kind, value:
        case "value", _:
            return None if test.holds(value) else _line("AssertionError", test.message)
        case "raised", (type(), (str(text),)):
            return _line(value[0].__name__, text)
        case "raised", (str(name), tuple()):
            return f"the program ended itself: {name}"
        case "refused", str(why):
            return f"the program's value was refused: {why}"
    return BROKE


def _line(name: str, text: str) -> str:
    return (f"{name}: {text}" if text else name).splitlines()[0]


def _no_object(tag: str, number: int) -> Any:  # noqa: ARG001 - signature of `resolve`
    raise NotPlainError("an object of the program is not a plain value and cannot be compared")
