"""Problems from rows: what the tests need of a program, and rows that cannot be graded."""

import json

import pytest

from proximo_verifiers.code.parsed_asserts import Names, names_of
from proximo_verifiers.code.problems import (
    TESTS_COLUMNS,
    Calls,
    InputsOutputs,
    TestSuite,
    read_problem,
    text_before,
)
from proximo_verifiers.errors import DataError

NAMES = (
    (["assert f(1) == 2"], ["f"], []),
    (["assert f(x) == g(1)"], ["f", "g", "x"], []),
    (["import math", "assert math.isclose(f(1), 2)"], ["f"], []),
    (["from math import pi as p", "assert f(p) == 2"], ["f"], []),
    (["assert f(1) == sys.getsizeof(1)"], ["f"], ["sys"]),
    (["assert bisect([1], 2) == 1"], ["bisect"], []),
    (["assert set(f(1)) == set([1])"], ["f"], []),
    (["assert sum(1, 2) == 3", "assert sum(2, 2) == 4"], ["sum"], []),
    (["assert abs(sum(1, 2)) == 3", "assert sum(2, 2) == 4"], ["sum"], []),
    (["assert [f(i) for i in range(3)] == [0, 1, 2]"], ["f"], []),
    (["def check(g):\n    assert g(1) == h(1)"], ["h"], []),
    (["root = Node(1)", "assert height(root) == 1"], ["Node", "height"], []),
    (["try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'x'"], ["f"], []),
    (["assert 1 == 1"], [], []),
    (["a = b = 1\nassert f(a) == b"], ["f"], []),
    (["assert f(lambda x: x) == 1"], ["f"], []),
)


@pytest.mark.parametrize(("sources", "program", "modules"), NAMES, ids=[str(case[0]) for case in NAMES])
def test_the_names_that_a_program_defines_are_read_off_the_tests(sources, program, modules) -> None:
    assert names_of(sources) == Names(program=tuple(program), modules=tuple(modules))


def read(form, prompt="", **metadata):
    return read_problem(form, TESTS_COLUMNS[form], metadata, prompt)


def test_asserts_are_tests_with_their_setup() -> None:
    problem = read(
        "asserts", test_list=["assert f(x) == 2", "assert f(2) == 3\r\n"], test_setup_code=["import os", "x = 1"]
    )
    assert isinstance(problem, TestSuite)
    assert problem.tests == ("assert f(x) == 2", "assert f(2) == 3\n")
    assert problem.setup == "import os\nx = 1"
    assert problem.names == (("f", "f"),)
    assert not problem.setup_uses_program


def test_a_setup_may_need_the_program() -> None:
    problem = read("asserts", test_list=["assert height(root) == 1"], test_setup_code="root = Node(1)")
    assert isinstance(problem, TestSuite)
    assert problem.setup_uses_program


CHECK = """
META = {}

def check(candidate):
    assert candidate(1) == 2
    x = candidate(2)
    y = x + 1
    assert y == 4, "message"
    assert True, "says nothing"
    for i in range(3):
        assert candidate(i) == i + 1
    print(x)
"""


def test_each_assert_of_check_is_a_test_with_what_leads_to_it() -> None:
    problem = read("check", test=CHECK, entry_point="inc")
    assert isinstance(problem, TestSuite)
    assert problem.tests == (
        "assert candidate(1) == 2",
        "x = candidate(2)\ny = x + 1\nassert y == 4, 'message'",
        "for i in range(3):\n    assert candidate(i) == i + 1",
        "print(x)",
    )
    assert dict(problem.names)["candidate"] == "inc"
    assert "check" not in problem.setup


def test_a_check_that_returns_stays_whole() -> None:
    test = "def check(candidate):\n    assert candidate(1)\n    return None\n"
    problem = read("check", test=test, entry_point="f")
    assert isinstance(problem, TestSuite)
    assert problem.tests == ("check(candidate)",)
    assert "def check" in problem.setup


def test_what_the_prompt_defines_is_not_the_programs_to_define() -> None:
    prompt = 'import math\ndef poly(xs, x):\n    return xs[0] * x\n\ndef find_zero(xs):\n    """Doc."""\n'
    test = "def check(candidate):\n    assert poly([1], candidate([1])) == 0\n"
    problem = read("check", prompt, test=test, entry_point="find_zero")
    assert isinstance(problem, TestSuite)
    assert dict(problem.names) == {"candidate": "find_zero"}
    assert "def poly" in problem.setup
    assert "find_zero" not in problem.setup


def test_inputs_and_outputs_are_texts_or_lists_of_lines() -> None:
    assert read("stdio", inputs=["1\n", ["2", "3"]], outputs=[["a"], "b"]) == InputsOutputs(
        (("1\n", "a"), ("2\n3", "b"))
    )


def test_one_column_of_json_holds_inputs_and_outputs_or_calls() -> None:
    stdio = {"inputs": ["1"], "outputs": ["2"]}
    assert read("input_output", input_output=json.dumps(stdio)) == InputsOutputs((("1", "2"),))
    assert read("input_output", input_output=stdio) == InputsOutputs((("1", "2"),))
    calls = {"fn_name": "f", "inputs": [[1, [2]]], "outputs": [3]}
    assert read("input_output", input_output=json.dumps(calls)) == Calls(
        function="f", arguments=([1, [2]],), expected=(3,)
    )


BAD = (
    ("asserts", {}, "no column test_list"),
    ("asserts", {"test_list": []}, "at least one test"),
    ("asserts", {"test_list": 3}, "a text or a list of texts"),
    ("asserts", {"test_list": [3]}, "a text or a list of texts"),
    ("asserts", {"test_list": ["assert f("]}, "are not Python"),
    ("asserts", {"test_list": ["assert 1 == 1"]}, "test nothing"),
    ("asserts", {"test_list": ["assert f(1)"], "test_setup_code": "def"}, "are not Python"),
    ("check", {"test": "x = 1", "entry_point": "f"}, "one function check"),
    ("check", {"test": "def check(", "entry_point": "f"}, "are not Python"),
    ("check", {"test": "def check(a): assert a(1)"}, "no column entry_point"),
    ("check", {"test": 3, "entry_point": "f"}, "must be a text"),
    ("stdio", {"inputs": ["1"]}, "no column outputs"),
    ("stdio", {"inputs": ["1"], "outputs": []}, "same length"),
    ("stdio", {"inputs": [], "outputs": []}, "at least one test"),
    ("stdio", {"inputs": [1], "outputs": ["1"]}, "must hold texts"),
    ("input_output", {"input_output": "{"}, "must be JSON"),
    ("input_output", {"input_output": "[]"}, "must be JSON"),
    ("input_output", {"input_output": {"inputs": []}}, "must be JSON"),
    ("input_output", {"input_output": {"fn_name": "f", "inputs": [], "outputs": []}}, "as many outputs"),
    ("input_output", {"input_output": {"fn_name": "f", "inputs": [1], "outputs": [1]}}, "each input a list"),
)


@pytest.mark.parametrize(("form", "metadata", "message"), BAD)
def test_a_row_that_cannot_be_graded_is_refused_with_the_reason(form, metadata, message) -> None:
    with pytest.raises(DataError, match=message):
        read(form, **metadata)


def test_tests_that_python_warns_of_are_read() -> None:
    assert names_of(["assert f('\\d') == 1"]).program == ("f",)


def test_code_before_the_program_is_joined() -> None:
    assert text_before({"code_before": ["import os", "x = 1"]}) == "import os\nx = 1"
    assert text_before({}) == ""
