"""A program whose functions are called with values. What they have to return stays outside of the sandbox."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from io import RawIOBase
from select import select
from threading import Thread
from typing import Any, Final

from proximo.rewards.code.harness_source import program_that_calls, program_that_is_tested, uses_random
from proximo.rewards.code.inside.codec import Decoder, RefusedError
from proximo.rewards.code.inside.rpc_peer import BROKE, MAX_BYTES, Message, NotPlainError, parsed
from proximo.rewards.code.output_comparison import same_value
from proximo.rewards.code.parsed_asserts import Comparison
from proximo.rewards.code.problems import Calls
from proximo.rewards.code.result import MAX_REASON, Fault, Findings, ended_at, with_outcome
from proximo.sandbox.jobs import Ending, Job, Limits, Outcome, Program, Runner

CHANNEL: Final = 3
MAX_RESULTS_BYTES: Final = MAX_BYTES
LEAVE_SECONDS: Final = 0.5
"""For a program to end that has said everything."""
Wrong = Callable[[Message], str | None]
"""Why a result is not the expected one, or None where it is."""


def run_calls(
    runner: Runner, program: str, problem: Calls, *, before: str, limits: Limits, tolerance: float | None
) -> Findings:
    """Runs the program once, calls its function with each list of arguments, and compares here what it returned.

    Raises SandboxError where nothing can be run.
    """
    source = program_that_calls(
        program, problem.function, problem.arguments, before=before, seeded=uses_random(program + before)
    )
    return _run(runner, source, [partial(_not_same, each, tolerance) for each in problem.expected], limits)


def run_comparisons(
    runner: Runner, program: str, tests: Sequence[Comparison], *, before: str, limits: Limits
) -> Findings:
    """Runs the program once, calls its functions as the tests do, and compares here what they returned.

    Raises SandboxError where nothing can be run.
    """
    source = program_that_is_tested(program, tests, before=before, seeded=uses_random(program + before))
    return _run(runner, source, [partial(_fails, each) for each in tests], limits)


def _run(runner: Runner, source: str, tests: Sequence[Wrong], limits: Limits) -> Findings:
    outcome, written = _outcome_and_results(runner, source, limits, num_messages=1 + len(tests))
    stopped = ended_at(outcome, limits) if outcome.ending is not Ending.KILLED else None
    return with_outcome(_graded(_messages(written), tests, stopped), outcome, limits)


def _graded(messages: Iterator[Message], tests: Sequence[Wrong], stopped: str | None) -> Findings:
    found = Findings(num_tests=len(tests))
    match next(messages, None):
        case ["failed", "compile", str(why)]:
            reason = f"the program cannot be compiled: {why}"
            return replace(found, compiled=False, ran=False, fault=Fault.PROGRAM, reason=reason[:MAX_REASON])
        case ["failed", _, str(why)]:
            return replace(found, ran=False, fault=Fault.PROGRAM, reason=why[:MAX_REASON])
        case ["ready"]:
            return _compared(found, messages, tests, stopped)
    return replace(found, ran=False, fault=Fault.PROGRAM, reason=stopped or "the program ended itself")


def _compared(found: Findings, messages: Iterator[Message], tests: Sequence[Wrong], stopped: str | None) -> Findings:
    """One message is taken apart after the other: a program may write as much as it likes in each."""
    for number, wrong in enumerate(tests):
        title = f"test {number + 1} of {found.num_tests}"
        message = next(messages, None)
        if message is None:
            return replace(found.because(f"{stopped or 'the program ended itself'} in {title}"), fault=Fault.PROGRAM)
        why = wrong(message)
        passed = replace(found, num_passed=found.num_passed + 1)
        found = passed if why is None else found.because(f"{title} failed: {why}")
    return found


def _outcome_and_results(runner: Runner, source: str, limits: Limits, *, num_messages: int) -> tuple[Outcome, bytes]:
    """What became of the program, and what it wrote to the channel, a bounded part of it."""
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
                # Nobody waits for a program that has said everything and will not end.
                if not select([pipe], [], [], LEAVE_SECONDS)[0] or pipe.read(1):
                    job.kill()
                return


def _end_of_message(written: bytes | bytearray, start: int) -> int | None:
    """Of the one that begins at `start`; None where it is not all there."""
    end = start + 4 + int.from_bytes(written[start : start + 4], "big")
    return end if start + 4 <= len(written) and end <= len(written) else None


def _messages(written: bytes) -> Iterator[Message]:
    """What was written, up to the first that is no message."""
    start = 0
    while (end := _end_of_message(written, start)) is not None:
        message = parsed(written[start + 4 : end]) if end - start - 4 <= MAX_BYTES else None
        if message is None:
            return
        yield message
        start = end


def _not_same(expected: Any, tolerance: float | None, message: Message) -> str | None:
    """`Wrong`, for a value of JSON."""
    try:
        kind, _, tree = message
        value = Decoder([], _no_object, {}).value(tree)
    except (RefusedError, ValueError, RecursionError, NotPlainError) as error:
        return f"the result is no plain value: {error}"
    if kind == "value":
        # Some sets of problems put the one result into a list of its own.
        alone = isinstance(expected, list) and len(expected) == 1
        candidates = (expected, expected[0]) if alone else (expected,)
        right = any(same_value(value, each, tolerance=tolerance) for each in candidates)
        return None if right else "another result"
    # Texts alone: one list that holds another twice, and so on, would be a text of any length.
    match kind, value:
        case "raised", (type(), _):
            return value[0].__name__
        case "raised", (str(name), _):
            return name[:100]
        case "refused", str(why):
            return f"the result is no plain value: {why[:100]}"
    return BROKE


def _fails(test: Comparison, message: Message) -> str | None:
    """`Wrong`, for an assert: what it would raise."""
    try:
        kind, _, tree = message
        value = Decoder([], _no_object, {}).value(tree)
    except (RefusedError, ValueError, RecursionError, NotPlainError) as error:
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


def _no_object(tag: str, number: int) -> Any:  # noqa: ARG001 - as Decoder calls it
    raise NotPlainError("an object of the program is no plain value and cannot be compared")
