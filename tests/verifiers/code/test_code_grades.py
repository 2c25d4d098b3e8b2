"""Grades on programs: scores, states, components and reasons."""

import math

import pytest
from grade_cases import ASSERTS, FAULTS, INC, RIGHT

from graded_programs import graded
from proximo_verifiers.code.verifier import CodeVerifier
from proximo_verifiers.errors import DataError
from proximo_verifiers.verifier import Answer, ScoreState


@pytest.mark.parametrize(("name", "program", "row", "score", "reason"), ASSERTS, ids=[case[0] for case in ASSERTS])
def test_asserts_are_graded_as_plain_python_would(sandbox, *, name, program, row, score, reason) -> None:
    found = graded(sandbox, program, row)
    assert (found.score, found.state) == (score, ScoreState.SCORED), found
    assert found.reason is None if reason is None else reason in (found.reason or "")


@pytest.mark.parametrize(("name", "program", "reason", "components"), FAULTS, ids=[case[0] for case in FAULTS])
def test_what_the_program_is_to_blame_for_has_the_score_of_a_wrong_one_and_says_why(
    sandbox, name, program, reason, components
) -> None:
    found = graded(sandbox, program, INC, cpu_seconds=0.2, incorrect_score=-1.0)
    assert found.score == -1.0
    assert any(each in (found.reason or "") for each in reason.split("|")), found
    if components is not None:
        assert found.state is ScoreState.MODEL_FAULT
        assert tuple(found.components[key] for key in ("tests_passed", "ran", "compiled")) == components


def test_a_reason_holds_nothing_that_a_terminal_would_obey(sandbox) -> None:
    program = "def inc(x): raise ValueError('\\x1b[2J\\x07 \\u202e \\U000e0041 é')"
    reason = "test 1 of 3 failed: ValueError: \\x1b[2J\\x07 \\u202e \\U000e0041 é"
    assert graded(sandbox, program, INC).reason == reason


BROKEN = (
    ("a module that is not there", {"test_list": ["import nowhere\nassert inc(1) == 2"]}, "ModuleNotFoundError"),
    ("an argument that cannot be given",
     {"test_list": ["class A: pass\nassert inc(A()) == 2"]}, "class A is not a plain value"),
    ("a set-up of its own", {"test_list": ["assert inc(x) == 2"], "test_setup_code": "x = 1 / 0"}, "ZeroDivisionError"),
    ("tests that end their process", {"test_list": ["import os\nos._exit(0) if inc(1) == 2 else 0"]}, "did not end"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "row", "reason"), BROKEN, ids=[case[0] for case in BROKEN])
def test_tests_that_fail_by_themselves_say_nothing_of_the_program(sandbox, name, row, reason) -> None:
    found = graded(sandbox, RIGHT, row)
    assert found.state is ScoreState.INFRASTRUCTURE_FAULT
    assert math.isnan(found.score)
    assert reason in (found.reason or "")


def test_a_program_that_makes_the_tests_reach_a_limit_gains_nothing(sandbox, monkeypatch) -> None:
    monkeypatch.setattr("proximo_verifiers.code.test_runner.TESTS_CPU_SECONDS", 0.5)
    row = {"test_list": ["assert sum(1 for _ in range(rounds())) == 3"]}
    found = graded(sandbox, "def rounds(): return 10 ** 12", row, incorrect_score=-1.0)
    assert (found.score, found.state) == (-1.0, ScoreState.MODEL_FAULT)
    assert found.reason == "the tests did not end by themselves: cpu limit of 0.5 s"


def test_a_program_that_will_not_end_after_its_tests_costs_no_more_time_than_they(sandbox) -> None:
    program = "import os, time\nos._exit = lambda *a: time.sleep(1e6)\n" + RIGHT
    assert graded(sandbox, program, INC).score == 1.0, "it was not left to its wall limit"


def test_an_import_that_the_program_lacks_is_the_programs_fault(sandbox) -> None:
    found = graded(sandbox, "def inc(x):\n    import nowhere", INC)
    assert (found.score, found.state) == (0.0, ScoreState.SCORED)


STDIO = (
    ("right", "a, b = map(int, input().split())\nprint(a + b)", 1.0, None),
    ("white space", "a, b = map(int, input().split())\nprint(a + b, ' ')\nprint()", 1.0, None),
    ("wrong", "print(3)", 0.0, "test 2 of 2 failed: another output"),
    ("right, but it fails", "a, b = map(int, input().split())\nprint(a + b)\nraise ValueError('x')", 0.0,
     "exit status 1 in test 1 of 2: ValueError: x"),
    ("right, with a status", "a, b = map(int, input().split())\nprint(a + b)\nexit(3)", 0.0, "exit status 3"),
    ("the main program is run",
     "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()", 1.0, None),
    ("no syntax", "print(", 0.0, "cannot be compiled: SyntaxError"),
    ("loops on the second", "x = input()\nwhile x == '2 2': pass\nprint(3)", 0.0, "cpu limit of 0.2 s in test 2 of 2"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "program", "score", "reason"), STDIO, ids=[case[0] for case in STDIO])
def test_outputs_are_compared_outside(sandbox, name, program, score, reason) -> None:
    row = {"inputs": ["1 2\n", "2 2\n"], "outputs": ["3\n", "4\n"]}
    found = graded(sandbox, program, row, form="stdio", cpu_seconds=0.2)
    assert found.score == score, found
    assert found.reason is None if reason is None else reason in (found.reason or "")


CALLS = (
    ("right", "def f(xs, k):\n    return sorted(xs)[:k]", 1.0, None),
    ("a method", "class Solution:\n    def f(self, xs, k):\n        return sorted(xs)[:k]", 1.0, None),
    ("a tuple for a list", "def f(xs, k):\n    return tuple(sorted(xs)[:k])", 1.0, None),
    ("it prints as well", "def f(xs, k):\n    print('[1]')\n    return sorted(xs)[:k]", 1.0, None),
    ("wrong", "def f(xs, k):\n    return xs[:k]", 0.0, "test 1 of 2 failed: another result"),
    ("raises", "def f(xs, k):\n    return xs[9]", 0.0, "test 1 of 2 failed: IndexError"),
    ("iterator", "def f(xs, k):\n    return iter(xs)", 0.0, "test 1 of 2 failed: the result is not a plain value"),
    ("missing", "def g(): pass", 0.0, "test 1 of 2 failed: AttributeError"),
    ("exits", "def f(xs, k):\n    exit()", 0.0, "test 1 of 2 failed: SystemExit"),
    ("ends", "import os\ndef f(xs, k):\n    os._exit(0)", 0.0, "the program ended itself in test 1 of 2"),
    ("no syntax", "def f(", 0.0, "cannot be compiled: SyntaxError"),
    ("fails at once", "1 / 0", 0.0, "ZeroDivisionError"),
    ("loops on the second", "def f(xs, k):\n    while k == 2: pass\n    return [1]", 0.0,
     "cpu limit of 0.2 s in test 2 of 2"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "program", "score", "reason"), CALLS, ids=[case[0] for case in CALLS])
def test_returned_values_are_compared_outside(sandbox, name, program, score, reason) -> None:
    row = {"input_output": {"fn_name": "f", "inputs": [[[3, 1], 1], [[2, 1], 2]], "outputs": [[1], [[1, 2]]]}}
    found = graded(sandbox, program, row, form="input_output", cpu_seconds=0.2)
    assert found.score == score, found
    assert found.reason is None if reason is None else reason in (found.reason or "")


def test_a_share_of_the_tests_earns_a_share_of_the_score_by_choice(sandbox) -> None:
    two_of_three = "def inc(x): return abs(x + 1) if x != 5 else 0"
    found = graded(sandbox, two_of_three, INC, partial=True, correct_score=2.0, incorrect_score=-1.0)
    assert found.score == pytest.approx(1.0)
    assert found.components["tests_passed"] == pytest.approx(2 / 3)
    assert graded(sandbox, two_of_three, INC, correct_score=2.0, incorrect_score=-1.0).score == -1.0
    assert graded(sandbox, RIGHT, INC, partial=True, correct_score=2.0, incorrect_score=-1.0).score == 2.0


def test_an_answer_without_a_program_has_a_score_of_its_own(sandbox) -> None:
    found = graded(sandbox, "I do not know.", INC, program="last_block", no_answer_score=-0.5)
    assert (found.score, found.state, found.reason) == (-0.5, ScoreState.MODEL_FAULT, "no program in the answer")
    text = "def inc(x): return x + 1"
    assert graded(sandbox, text, INC, program="last_block").reason == "no program in the answer"
    assert graded(sandbox, text, INC, program="last_block", allow_unfenced=True).score == 1.0
    long = graded(sandbox, "#" * 100_001, INC, no_answer_score=-0.5)
    assert (long.score, long.reason) == (-0.5, "the program is too long")


def test_code_is_put_before_the_program(sandbox) -> None:
    program = "from __future__ import annotations\ndef inc(x): return step(x)"
    row = INC | {"code_before": "def step(x): return x + 1"}
    assert graded(sandbox, program, row).score == 1.0
    stdio = {"inputs": ["1"], "outputs": ["2"], "code_before": "def step(x): return x + 1"}
    assert graded(sandbox, "print(step(int(input())))", stdio, form="stdio").score == 1.0


def test_a_limit_for_each_test_is_not_that_of_all(sandbox) -> None:
    """Each of three tests burns 0.05 s."""
    program = (
        "import time\ndef burn():\n    end = time.process_time() + 0.05\n    while time.process_time() < end: pass\n"
    )
    row = {"test_list": ["assert inc(1) == 2"] * 3}
    burning = program + "def inc(x):\n    burn()\n    return x + 1"
    assert "cpu limit" in str(graded(sandbox, burning, row, cpu_seconds=0.12).reason)
    assert graded(sandbox, burning, row, cpu_seconds=0.12, limit_per_test=True).score == 1.0
    stdio = {"inputs": [""] * 3, "outputs": ["1"] * 3}
    burning = program + "burn()\nprint(1)"
    assert "cpu limit" in str(graded(sandbox, burning, stdio, form="stdio", cpu_seconds=0.12).reason)
    assert graded(sandbox, burning, stdio, form="stdio", cpu_seconds=0.12, limit_per_test=True).score == 1.0


def test_a_tolerance_is_for_outputs_and_returned_values(sandbox) -> None:
    stdio = {"inputs": [""], "outputs": ["0.333333"]}
    assert graded(sandbox, "print(1 / 3)", stdio, form="stdio").score == 0.0
    assert graded(sandbox, "print(1 / 3)", stdio, form="stdio", float_tolerance=1e-5).score == 1.0
    calls = {"input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [0.333333]}}
    assert graded(sandbox, "def f(x): return x / 3", calls, form="input_output").score == 0.0
    assert graded(sandbox, "def f(x): return x / 3", calls, form="input_output", float_tolerance=1e-5).score == 1.0


def test_memory_is_limited_as_asked(sandbox) -> None:
    program = "def inc(x):\n    return x + len(bytearray(150 * 2 ** 20)) // (150 * 2 ** 20)"
    assert graded(sandbox, program, INC, memory_mib=400).score == 1.0
    assert graded(sandbox, program, INC, memory_mib=170).score == 0.0


CHECK = {"entry_point": "inc", "test": "def check(candidate):\n    assert candidate(1) == 2\n    assert inc(2) == 3\n"}


def test_a_completion_goes_on_from_the_prompt_or_from_a_column(sandbox) -> None:
    prompt = "def step():\n    return 1\n\ndef inc(x):\n"
    body = "    return x + step()\n"
    options = {"form": "check", "program": "completion"}
    assert graded(sandbox, body, CHECK, prompt=prompt, **options).score == 1.0
    messages = [{"role": "user", "content": "old"}, {"role": "assistant", "content": "x"}]
    messages += [{"role": "user", "content": prompt}]
    assert graded(sandbox, body, CHECK, prompt=messages, **options).score == 1.0
    assert graded(sandbox, body, CHECK | {"stub": prompt}, prompt="Complete this:", **options).score == 1.0
    with pytest.raises(DataError, match="column 'stub' must be the code to complete as text"):
        graded(sandbox, body, CHECK | {"stub": 3}, prompt=prompt, **options)


def test_a_row_without_tests_is_refused_before_any_answer(sandbox) -> None:
    verifier = CodeVerifier(runner=sandbox, form="asserts")
    verifier.check_row(None, INC)
    with pytest.raises(DataError, match="no column test_list"):
        verifier.check_row(None, {})
    with pytest.raises(DataError):
        verifier.grade(Answer(text="```\nx = 1\n```", prompt="", metadata={}))


def test_other_columns_are_read_where_they_are_named(sandbox) -> None:
    row = {"mine": ["assert inc(one) == 2"], "mine_too": "assert inc(2) == 3", "test_setup_code": "one = 1"}
    assert graded(sandbox, RIGHT, row, tests_columns=["mine", "mine_too"]).score == 1.0
