"""A program that reads standard input and writes standard output, once for each test.

What is expected stays outside: the sandbox is given inputs, and what comes out is compared here.
"""

from dataclasses import replace
from typing import Final

from proximo.rewards.code.output_comparison import same_output
from proximo.rewards.code.problems import InputsOutputs
from proximo.rewards.code.result import Fault, Findings, ended_at, last_line, stopped_by
from proximo.sandbox.jobs import Ending, Limits, Program, Runner

SYNTAX_ERRORS: Final = ("SyntaxError", "IndentationError", "TabError")
SHORTEST_SECONDS: Final = 0.01
"""A limit, where nothing is left of one."""


def run_inputs(
    runner: Runner,
    program: str,
    problem: InputsOutputs,
    *,
    limits: Limits,
    cpu_seconds_each: float | None,
    tolerance: float | None,
) -> Findings:
    """Runs the program once for each input. It has to end with status 0.

    `limits` are those of all inputs together; `cpu_seconds_each` of one alone. What reaches a limit is not run on the
    remaining inputs.
    """
    found = Findings(num_tests=len(problem.pairs))
    cpu_left, wall_left, idle_left = limits.cpu_seconds, limits.wall_seconds, limits.idle_seconds
    for number, (given, expected) in enumerate(problem.pairs):
        cpu = max(cpu_left, SHORTEST_SECONDS) if cpu_seconds_each is None else cpu_seconds_each
        idle = None if idle_left is None else max(idle_left, SHORTEST_SECONDS)
        wall = max(wall_left, SHORTEST_SECONDS)
        allowed = replace(limits, cpu_seconds=cpu, wall_seconds=wall, idle_seconds=idle)
        outcome = runner.start(Program(source=program, stdin=given.encode("utf-8", "replace"), limits=allowed)).wait()
        cpu_left -= outcome.cpu_seconds
        wall_left -= outcome.wall_seconds
        idle_left = None if idle_left is None else idle_left - outcome.idle_seconds
        title = f"test {number + 1} of {found.num_tests}"
        stopped = ended_at(outcome, replace(limits, cpu_seconds=cpu_seconds_each or limits.cpu_seconds))
        if stopped is None and same_output(outcome.stdout.decode("utf-8", "replace"), expected, tolerance=tolerance):
            found = replace(found, num_passed=found.num_passed + 1)
            continue
        if stopped is None:
            found = found.because(f"{title} failed: another output")
        elif outcome.ending is Ending.EXIT:
            found = _crashed(found, f"{stopped} in {title}", last_line(outcome.stderr))
            if not found.compiled:
                return found
        else:
            return replace(stopped_by(outcome, found.because(f"{stopped} in {title}")), ran=False)
    return found


def _crashed(found: Findings, reason: str, line: str) -> Findings:
    if line.startswith(SYNTAX_ERRORS):
        reason = f"the program cannot be compiled: {line}"
        return replace(found, compiled=False, ran=False, fault=Fault.PROGRAM, reason=reason)
    return replace(found.because(f"{reason}: {line}" if line else reason), ran=False)
