"""The developers' parts of HumanEval and MBPP, each row with its program and what plain Python runs for it."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from graded_programs import graded
from proximo_verifiers.sandbox.jobs import Ending, Limits, Program
from proximo_verifiers.sandbox.runner import Sandbox
from proximo_verifiers.verifier import Grade

SLOW = {"mbpp/123": 20.0}
"""CPU seconds of reference programs that need more than a few: it sums all divisors of all numbers below 10,000."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A row, its reference program, and the tests as one text that follows the program."""

    name: str
    program: str
    plain_tests: str
    row: dict[str, Any]
    options: dict[str, Any]

    def grade(self, sandbox: Sandbox, program: str, cpu_seconds: float = 4.0) -> Grade:
        limit = SLOW.get(self.name, cpu_seconds)
        return graded(sandbox, program, self.row, cpu_seconds=limit, **self.options)

    def passes_plainly(self, sandbox: Sandbox, program: str, cpu_seconds: float = 4.0) -> bool:
        """Whether the program and its tests, as one program, run to their end without an exception."""
        limits = Limits(cpu_seconds=SLOW.get(self.name, cpu_seconds))
        outcome = sandbox.run(Program(source=f"{program}\n{self.plain_tests}\n", limits=limits))
        return outcome.ending is Ending.EXIT and outcome.status == 0


def data_folder() -> Path:
    if "PROXIMO_TEST_DATA" not in os.environ:
        pytest.skip("set PROXIMO_TEST_DATA to the folder with humaneval and mbpp")
    return Path(os.environ["PROXIMO_TEST_DATA"])


def human_eval() -> list[Problem]:
    lines = (data_folder() / "humaneval/humaneval_dev.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        Problem(
            name=row["task_id"],
            program=row["prompt"] + row["canonical_solution"],
            plain_tests=f"{row['test']}\ncheck({row['entry_point']})",
            row={key: value for key, value in row.items() if key != "prompt"},
            options={"form": "check", "prompt": row["prompt"]},
        )
        for row in map(json.loads, lines)
    ]


def mbpp() -> list[Problem]:
    lines = (data_folder() / "mbpp/mbpp_dev.jsonl").read_text(encoding="utf-8").splitlines()
    return [_mbpp_problem(row, "mbpp") for row in map(json.loads, lines)]


def sanitized_mbpp() -> list[Problem]:
    rows = json.loads((data_folder() / "mbpp/sanitized_mbpp_dev.json").read_text(encoding="utf-8"))
    return [_mbpp_problem(row, "mbpp") for row in rows]


def _mbpp_problem(row: dict[str, Any], source: str) -> Problem:
    program = row["code"].replace("\r\n", "\n")
    setup = [row.get("test_setup_code", "").replace("\r\n", "\n"), *row.get("test_imports", [])]
    tests = [*row["test_list"], *row.get("challenge_test_list", [])]
    columns = ["test_list", "challenge_test_list"] if "challenge_test_list" in row else ["test_list"]
    return Problem(
        name=f"{source}/{row['task_id']}",
        program=program,
        plain_tests="\n".join((*setup, *tests)),
        row=row,
        options={"tests_columns": columns},
    )
