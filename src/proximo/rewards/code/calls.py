"""A program whose function is called with values of JSON. What it has to return stays outside of the sandbox."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import Thread
from typing import Any, Final, Self

from proximo.rewards.code.comparing import same_value
from proximo.rewards.code.findings import MAX_REASON, Fault, Findings, ended_at
from proximo.rewards.code.inside.codec import Decoder, RefusedError
from proximo.rewards.code.inside.peer import MAX_BYTES, Message, parsed
from proximo.rewards.code.problems import Calls
from proximo.rewards.code.shipping import program_that_calls, uses_random
from proximo.sandbox.jobs import Ending, Limits, Program, Runner

CHANNEL: Final = 3
MAX_RESULTS_BYTES: Final = 4 * MAX_BYTES


def run_calls(
    runner: Runner, program: str, problem: Calls, *, before: str, limits: Limits, tolerance: float | None
) -> Findings:
    """Runs the program once, calls its function with each list of arguments, and compares here what it returned.

    Raises SandboxError where nothing can be run.
    """
    source = program_that_calls(
        program, problem.function, problem.arguments, before=before, seeded=uses_random(program + before)
    )
    with Results() as results:
        outcome = runner.start(Program(source=source, descriptors={CHANNEL: results.writing}, limits=limits)).wait()
    messages = list(results.messages())
    stopped = ended_at(outcome, limits)
    found = Findings(num_tests=len(problem.expected), at_wall_limit=outcome.ending is Ending.WALL)
    match messages:
        case [["failed", "compile", str(why)], *_]:
            reason = f"the program cannot be compiled: {why}"
            return replace(found, compiled=False, ran=False, fault=Fault.PROGRAM, reason=reason[:MAX_REASON])
        case [["failed", _, str(why)], *_]:
            return replace(found, ran=False, fault=Fault.PROGRAM, reason=why[:MAX_REASON])
        case [["ready"], *_]:
            return _compared(found, messages[1:], problem.expected, stopped, tolerance)
    return replace(found, ran=False, fault=Fault.PROGRAM, reason=stopped or "the program ended itself")


def _compared(
    found: Findings, messages: list[Message], expected: Sequence[Any], stopped: str | None, tolerance: float | None
) -> Findings:
    for number, each in enumerate(expected):
        title = f"test {number + 1} of {found.num_tests}"
        if number >= len(messages):
            return replace(found.because(f"{stopped or 'the program ended itself'} in {title}"), fault=Fault.PROGRAM)
        why = _wrong(messages[number], each, tolerance)
        passed = replace(found, num_passed=found.num_passed + 1)
        found = passed if why is None else found.because(f"{title} failed: {why}")
    return found


class Results:
    """A pipe that is read to its end while the program runs, a bounded part of it."""

    def __init__(self) -> None:
        reading, self.writing = os.pipe()
        self._data = bytearray()
        self._thread = Thread(target=self._read, args=(reading,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.writing)
        self._thread.join()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb", buffering=0) as pipe:
            while len(self._data) < MAX_RESULTS_BYTES and (part := pipe.read(2**16)):
                self._data += part

    def messages(self) -> Iterator[Message]:
        """What was written, up to the first that is no message."""
        start = 0
        while start + 4 <= len(self._data):
            end = start + 4 + int.from_bytes(self._data[start : start + 4], "big")
            message = parsed(bytes(self._data[start + 4 : end])) if end <= len(self._data) else None
            if message is None:
                return
            yield message
            start = end


def _wrong(message: Message, expected: Any, tolerance: float | None) -> str | None:
    """Why a result is not the expected one."""
    try:
        kind, _, tree = message
        value = Decoder([], _no_object, {}).value(tree)
    except (RefusedError, ValueError, RecursionError) as error:
        return f"the result is no plain value: {error}"
    if kind == "value":
        # Some sets of problems put the one result into a list of its own.
        alone = isinstance(expected, list) and len(expected) == 1
        candidates = (expected, expected[0]) if alone else (expected,)
        right = any(same_value(value, each, tolerance=tolerance) for each in candidates)
        return None if right else "another result"
    if kind == "raised" and type(value) is tuple and len(value) == 2:
        return value[0].__name__ if isinstance(value[0], type) else str(value[0])[:100]
    return f"the result is no plain value: {str(value)[:100]}"


def _no_object(tag: str, number: int) -> Any:
    raise RefusedError(f"an object of the program ({tag} {number})")
