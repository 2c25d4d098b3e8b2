"""Verifications of small programs per second of processor time, and by the clock: one sandbox, already started.

    python benchmarks/code_verifiers.py [--repeats N]

Processor time is that of the verifier and of all that it started, less what an idle sandbox costs. Divide the other way
to see what one verification costs. The last column is by the clock, and depends on what else the machine does.
"""

import argparse
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proximo_verifiers.code.verifier import CodeVerifier
from proximo_verifiers.verifier import Answer

WHOSE = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
SQUARE = "def f(x):\n    return x * x + 1\n"
CALLS = {"fn_name": "f", "inputs": [[3], [4], [5]], "outputs": [10, 17, 26]}


@dataclass(frozen=True)
class Case:
    """A program with its tests."""

    name: str
    program: str
    row: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("three asserts", SQUARE, {"test_list": ["assert f(3) == 10", "assert f(4) == 17", "assert f(5) == 26"]}, {}),
    Case(
        "`check` with three asserts",
        SQUARE,
        {
            "entry_point": "f",
            "test": "def check(g):\n    assert g(3) == 10\n    assert g(4) == 17\n    assert g(5) == 26\n",
        },
        {"form": "check"},
    ),
    Case(
        "three asserts that have to be run",
        SQUARE,
        {"test_list": [f"assert abs(f({n}) - {n * n + 1}) < 1e-6" for n in (3, 4, 5)]},
    ),
    Case("a function called three times", SQUARE, {"input_output": CALLS}, {"form": "input_output"}),
    Case("one input, one output", "print(int(input()) + 1)", {"inputs": ["3"], "outputs": ["4"]}, {"form": "stdio"}),
)


def used() -> float:
    """Seconds of processor time of this process and of those that it has waited for."""
    return sum(times.ru_utime + times.ru_stime for times in map(resource.getrusage, WHOSE))


def seconds(case: Case, repeats: int) -> tuple[float, float]:
    """Processor time from start to end, and time by the clock of the verifications."""
    before = used()
    verifier = CodeVerifier(**{"form": "asserts", "program": "response"} | case.options)
    answer = Answer(text=case.program, prompt="", metadata=case.row)
    start = time.perf_counter()
    grades = [verifier.grade(answer) for _ in range(repeats)]
    clock = time.perf_counter() - start
    verifier.close()
    if not all(grade.score == 1.0 for grade in grades):
        raise SystemExit(f"{case.name}: {grades[0]}")
    return used() - before, clock


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=500, help="verifications of each program")
    repeats = parser.parse_args(arguments).repeats
    print("| program | per second of processor time | by the clock |")
    print("|---|---|---|")
    for case in CASES:
        idle, _ = seconds(case, 0)
        processor, clock = seconds(case, repeats)
        print(f"| {case.name} | {repeats / (processor - idle):,.0f} | {repeats / clock:,.0f} |")


if __name__ == "__main__":
    main()
