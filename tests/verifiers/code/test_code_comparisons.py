"""Tests that only compare: which they are, and that they are graded as those that are run."""

import json
import os
from pathlib import Path

import pytest
from forged_programs import FORGED, SQUARE
from grade_cases import ASSERTS, FAULTS, INC, RIGHT

from graded_programs import graded
from proximo_verifiers.code.parsed_asserts import MAX_CHARACTERS
from proximo_verifiers.code.problems import TESTS_COLUMNS, read_problem
from proximo_verifiers.verifier import ScoreState

RUN = {"test_setup_code": "len('')"}
"""What says nothing, but has to be run: so have the tests after it."""


def comparisons_of(row, form="asserts"):
    row = {"entry_point": "f"} | row
    row = {key: value for key, value in row.items() if value is not None}
    return read_problem(form, TESTS_COLUMNS[form], row, "").comparisons


COMPARED = (
    "assert f(1) == 2", "assert 2 == f(1)", "assert f(1, [2, (3, -4.5)], {'a': {1, 2}}) == {1: {'b'}}",
    "assert f() is None", "assert f(x=1) is True", "assert f('a', b=b'c') == 1 + 2j, 'a message'", "assert (f(1) == 2)",
)  # fmt: skip
RUN_TESTS = (
    "assert f(1) != 2", "assert f(1) < 2", "assert f(1) is 2", "assert f(1) is not None", "assert f(1)",
    "assert not f(1)", "assert 1 == f(1) == 1", "assert f(g(1)) == 2", "assert f(len) == 2", "assert f(*[1]) == 2",
    "assert f(**{'x': 1}) == 2", "assert f(x) == 2", "assert f(...) == 2", "assert f(1) == ...",
    "assert f(1) == [1] * 2",
    "assert f(set()) == set()", "assert f(1).x == 2", "assert f(1)(2) == 2", "assert len(f(1)) == 2", "f(1) == 2",
    "x = 1\nassert f(1) == 2", "assert f(1) == 2, print(1)", "assert f(1) == f(1)", "assert (yes := f(1)) == 2",
    "assert f(1) == 2; import os", "assert f(f'{1}') == 2", f"assert f(1) == '{'x' * MAX_CHARACTERS}'",
    "assert f(x=1, x=2) == 2", "assert f(__debug__=1) == 2", f"assert f(0x{'f' * 4000}) == 2",
    f"assert f({'[' * 120}{']' * 120}) == 2", f"assert f(x={'[' * 99}{']' * 99}) == 2",
)  # fmt: skip


@pytest.mark.parametrize("test", COMPARED)
def test_a_call_with_values_that_is_compared_with_a_value_need_not_be_run(test) -> None:
    found = comparisons_of({"test_list": [test, "assert f(1) == 2"]})
    assert found is not None
    assert [each.function for each in found] == ["f", "f"]


@pytest.mark.parametrize("test", RUN_TESTS, ids=range(len(RUN_TESTS)))
def test_whatever_else_a_test_does_is_run(test) -> None:
    assert comparisons_of({"test_list": [test, "assert f(1) == 2"]}) is None


@pytest.mark.parametrize(
    ("setup", "compared"),
    [
        ("'a text'\nimport math\nfrom typing import List\ndef g(x):\n    return 1 / 0\nMETA = {'a': [1]}", True),
        ("import nowhere", False),
        ("from nowhere import x", False),
        ("x = 1 / 0", False),
        ("x = f(1)", False),
        ("def g(x=1 / 0): pass", False),
        ("@staticmethod\ndef g(): pass", False),
        ("class A: pass", False),
        ("from typing import *", False),
        ("from typing import Dict, List\ndef g(x: List[int], *y: Dict[str, int]) -> list[str]: pass", True),
        ("from typing import Nowhere", False),
        ("from .typing import List", False),
        ("import msvcrt", False),
        ("a, b = 1, 2, 3", False),
        ("a = []\na[0] = 1", False),
        ("len.x = 1", False),
        ("def g(x: 1 / 0): pass", False),
        ("def g(*x: int[3]): pass", False),
        ("def g() -> print(): pass", False),
        ("def g(x, x): pass", False),
        ("def g():\n    nonlocal x", False),
    ],
)
def test_a_set_up_that_could_fail_or_call_the_program_is_run(setup, compared) -> None:
    found = comparisons_of({"test_list": ["assert f(1) == 2"], "test_setup_code": setup})
    assert (found is not None) is compared


@pytest.mark.parametrize("setup", ["def sum(a, b):\n    return 0", "sum = 1", "from math import fsum as sum"])
def test_a_function_that_the_set_up_defines_anew_is_the_set_ups(sandbox, setup) -> None:
    row = {"test_list": ["assert sum(1, 2) == 3"]}
    assert comparisons_of(row) is not None
    assert comparisons_of(row | {"test_setup_code": setup}) is None
    program = "def sum(a, b): return a + b"
    assert graded(sandbox, program, row).score == 1.0
    assert graded(sandbox, program, row | {"test_setup_code": setup}).score == 0.0


def test_what_a_test_expects_is_not_in_the_text_that_the_sandbox_gets(sandbox) -> None:
    sources = []

    class Watching:
        def start(self, program):
            sources.append(program.source)
            return sandbox.start(program)

    row = {"test_list": ["assert f(3) == 887766, 'wants 554433'"]}
    assert graded(Watching(), "def f(x): return 887700 + x * 22", row).score == 1.0
    assert len(sources) == 1
    assert "887766" not in sources[0]
    assert "554433" not in sources[0]


@pytest.mark.parametrize(("name", "program"), FORGED, ids=[case[0] for case in FORGED])
def test_a_forged_program_does_not_pass_tests_that_are_run(sandbox, name, program) -> None:
    assert comparisons_of(SQUARE) is not None, "that is what test_code_forging.py tries"
    assert comparisons_of(SQUARE | RUN) is None
    found = graded(sandbox, program, SQUARE | RUN, cpu_seconds=0.3)
    assert (found.score, found.components["tests_passed"]) == (0.0, 0.0), name
    assert found.state in (ScoreState.SCORED, ScoreState.MODEL_FAULT), found


BOTH = [case for case in ASSERTS if comparisons_of(case[2]) is not None]


@pytest.mark.parametrize(("name", "program", "row", "score", "reason"), BOTH, ids=[case[0] for case in BOTH])
def test_tests_that_are_run_say_what_a_comparison_says(sandbox, *, name, program, row, score, reason) -> None:
    compared, run = graded(sandbox, program, row), graded(sandbox, program, row | RUN)
    assert (compared.score, compared.reason, compared.components) == (run.score, run.reason, run.components), name
    assert compared.score == score
    assert reason is None or reason in str(run.reason)


@pytest.mark.parametrize(("name", "program"), [case[:2] for case in FAULTS], ids=[case[0] for case in FAULTS])
def test_both_ways_find_the_same_program_at_fault(sandbox, name, program) -> None:
    compared, run = (graded(sandbox, program, row, cpu_seconds=0.2) for row in (INC, INC | RUN))
    assert (compared.score, compared.state, compared.components) == (run.score, run.state, run.components), name


def test_a_message_of_an_assert_is_part_of_the_reason(sandbox) -> None:
    row = {"test_list": ["assert inc(1) == 3, 'three\\nof them'"]}
    assert graded(sandbox, RIGHT, row).reason == "test 1 of 1 failed: AssertionError: three"
    assert graded(sandbox, RIGHT, row | RUN).reason == "test 1 of 1 failed: AssertionError: three"


def test_every_call_has_the_function_that_the_program_had_defined_when_it_had_run(sandbox) -> None:
    program = "def inc(x):\n    globals()['inc'] = lambda x: 0\n    return x + 1\n"
    assert graded(sandbox, program, INC).score == graded(sandbox, program, INC | RUN).score == 1.0


def test_a_program_that_keeps_running_after_its_last_result_is_ended(sandbox) -> None:
    program = "import os, time\nos._exit = lambda *a: time.sleep(1e6)\ndef f(x): return x\n"
    row = {"input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [1]}}
    assert graded(sandbox, program, row, form="input_output").score == 1.0, "it was not left to its wall limit"


def test_most_problems_of_mbpp_and_human_eval_only_compare() -> None:
    if "PROXIMO_TEST_DATA" not in os.environ:
        pytest.skip("set PROXIMO_TEST_DATA to the folder with humaneval and mbpp")
    folder = Path(os.environ["PROXIMO_TEST_DATA"])
    for name, form, least in (("mbpp/mbpp_dev", "asserts", 0.99), ("humaneval/humaneval_dev", "check", 0.8)):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        compared = [comparisons_of(row, form) is not None for row in rows]
        assert sum(compared) / len(rows) > least, name
