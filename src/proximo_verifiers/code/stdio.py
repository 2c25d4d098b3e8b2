"""Runs a program once for each input, and compares what it writes or returns with what is expected.

The sandbox gets the inputs only; outputs are compared outside, where the expected ones stay.
"""

import math
from dataclasses import replace
from typing import Any, Final

from proximo_verifiers.code.problems import InputsOutputs
from proximo_verifiers.code.result import Fault, Findings, ended_at, last_line, stopped_by
from proximo_verifiers.sandbox.jobs import Ending, Limits, Program, Runner

SYNTAX_ERRORS: Final = ("SyntaxError", "IndentationError", "TabError")
SHORTEST_SECONDS: Final = 0.01
"""The smallest limit of a run, if previous runs used up the total."""
SEPARATOR_LIMIT = 400
"""Largest number of characters of a number that is compared with a tolerance; longer ones are compared as text."""


def run_inputs(
    runner: Runner,
    program: str,
    problem: InputsOutputs,
    *,
    limits: Limits,
    cpu_seconds_each: float | None,
    tolerance: float | None,
) -> Findings:
    """Runs the program once for each input; it must exit with status 0.

    `limits` hold for all inputs together, `cpu_seconds_each` for each. A program that exceeds a limit is not run on the
    remaining inputs.
    """
    findings = Findings(num_tests=len(problem.pairs))
    cpu_left, wall_left, idle_left = limits.cpu_seconds, limits.wall_seconds, limits.idle_seconds
    for number, (stdin, expected) in enumerate(problem.pairs):
        cpu = max(cpu_left, SHORTEST_SECONDS) if cpu_seconds_each is None else cpu_seconds_each
        idle = None if idle_left is None else max(idle_left, SHORTEST_SECONDS)
        wall = max(wall_left, SHORTEST_SECONDS)
        allowed = replace(limits, cpu_seconds=cpu, wall_seconds=wall, idle_seconds=idle)
        outcome = runner.start(Program(source=program, stdin=stdin.encode("utf-8", "replace"), limits=allowed)).wait()
        cpu_left -= outcome.cpu_seconds
        wall_left -= outcome.wall_seconds
        idle_left = None if idle_left is None else idle_left - outcome.idle_seconds
        title = f"test {number + 1} of {findings.num_tests}"
        stopped = ended_at(outcome, replace(limits, cpu_seconds=cpu_seconds_each or limits.cpu_seconds))
        if stopped is None and same_output(outcome.stdout.decode("utf-8", "replace"), expected, tolerance=tolerance):
            findings = replace(findings, num_passed=findings.num_passed + 1)
            continue
        if stopped is None:
            findings = findings.because(f"{title} failed: another output")
        elif outcome.ending is Ending.EXIT:
            findings = _crashed(findings, f"{stopped} in {title}", last_line(outcome.stderr))
            if not findings.compiled:
                return findings
        else:
            return replace(stopped_by(outcome, findings.because(f"{stopped} in {title}")), ran=False)
    return findings


def _crashed(findings: Findings, reason: str, line: str) -> Findings:
    if line.startswith(SYNTAX_ERRORS):
        reason = f"the program cannot be compiled: {line}"
        return replace(findings, compiled=False, ran=False, fault=Fault.PROGRAM, reason=reason)
    return replace(findings.because(f"{reason}: {line}" if line else reason), ran=False)


def same_output(written: str, expected: str, *, tolerance: float | None) -> bool:
    """Compares outputs as the checkers of programming contests do: line by line, ignoring white space at the end of
    each line and empty lines at the end of the text.

    With a tolerance the outputs may also be equal word by word, wherever the lines break. Two words that are both
    finite decimal numbers, of which at least one has a point or an exponent, are equal if they differ by no more than
    `tolerance`, absolutely or relative to the expected number.
    """
    if _lines(written) == _lines(expected):
        return True
    if tolerance is None:
        return False
    ours, theirs = written.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs, [tolerance] * len(ours)))


def same_value(actual: Any, expected: Any, *, tolerance: float | None) -> bool:
    """True if a Python value equals a JSON value.

    A tuple equals a list, an integer key its text, and an integer the float of the same value. A boolean is not a
    number, and a set equals no JSON value. With a tolerance, numbers of which one is a float may differ as in
    `same_output`.
    """
    if isinstance(expected, bool) or isinstance(actual, bool) or expected is None or isinstance(expected, str):
        return type(actual) is type(expected) and actual == expected
    if isinstance(expected, int | float):
        return type(actual) in (int, float) and _same_number(actual, expected, tolerance)
    if isinstance(expected, list | tuple):
        if type(actual) not in (list, tuple) or len(actual) != len(expected):
            return False
        return all(same_value(a, b, tolerance=tolerance) for a, b in zip(actual, expected, strict=True))
    if type(actual) is not dict or len(actual) != len(expected):
        return False
    named = {str(key) if type(key) is int else key: value for key, value in actual.items()}
    return named.keys() == expected.keys() and all(
        same_value(named[key], expected[key], tolerance=tolerance) for key in named
    )


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_word(ours: str, theirs: str, tolerance: float) -> bool:
    if ours == theirs:
        return True
    numbers = [_number(word) for word in (ours, theirs)]
    if numbers[0] is None or numbers[1] is None or not set(".eE") & set(ours + theirs):
        return False
    return _same_number(numbers[0], numbers[1], tolerance)


def _number(word: str) -> float | None:
    """The value of a decimal number; None for other texts that float() accepts, such as `nan`."""
    if len(word) > SEPARATOR_LIMIT or not word.isascii() or set(word) - set("0123456789+-.eE"):
        return None
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _same_number(actual: float, expected: float, tolerance: float | None) -> bool:
    if actual == expected or tolerance is None or (isinstance(actual, int) and isinstance(expected, int)):
        return actual == expected
    try:
        return math.isclose(actual, expected, rel_tol=0.0, abs_tol=tolerance * max(1.0, abs(expected)))
    except OverflowError:
        return False
