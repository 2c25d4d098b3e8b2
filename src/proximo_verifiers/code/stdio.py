"""Runs a program once for each input and compares its standard output.

The sandbox gets the inputs only; outputs are compared outside, where the expected ones stay.
"""

from dataclasses import replace
from typing import Final

from proximo_verifiers.code.output_comparison import same_output
from proximo_verifiers.code.problems import InputsOutputs
from proximo_verifiers.code.result import Fault, Findings, ended_at, last_line, stopped_by
from proximo_verifiers.sandbox.jobs import Ending, Limits, Program, Runner

SYNTAX_ERRORS: Final = ("SyntaxError", "IndentationError", "TabError")
SHORTEST_SECONDS: Final = 0.01
"""The smallest limit of a run, if previous runs used up the total."""


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
