"""Data sets of problems become prompts with what a verifier reads: on their real files, and row by row."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from chat_families import FAMILIES
from proximo.data.prompts import PromptOptions, load_prompts
from proximo.data.readers.problems import BRACE, as_problem, last_boxed
from proximo.data.readers.reading import load_rows
from proximo.data.readers.source import DataSource, Problems, with_columns
from proximo.data.rows import Row
from proximo.errors import DataError
from real_data import real_data

GSM8K = {"question": "How many?", "answer": "Half of 48 is <<48/2=24>>24.\n#### 1,024"}
MATH = {"problem": "What is it?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "answer": r"\frac{1}{2}", "level": 3}
HUMANEVAL = {
    "task_id": "HumanEval/7",
    "prompt": 'def add(x, y):\n    """Add."""\n',
    "entry_point": "add",
    "canonical_solution": "    return x + y\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}
MBPP = {
    "text": "Write a function to add.",
    "code": "def helper(x):\r\n    return x\r\ndef add(x, y):\r\n    return x + y",
    "task_id": 11,
    "test_setup_code": "",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "challenge_test_list": [],
}
SANITIZED = {
    "prompt": "Write a function to add.",
    "code": MBPP["code"],
    "task_id": 11,
    "test_imports": ["import math"],
    "test_list": MBPP["test_list"],
}
COUNTDOWN = {"nums": [3, 5, 7], "target": 26, "solution": "(3 * 7) + 5"}
AREAL_MATH = {"task": "math", "query_id": "q1", "prompt": "What?", "solutions": [r"so \boxed{4}", "4.0"]}
AREAL_CODE = {
    "task": "code",
    "query_id": "q2",
    "prompt": "Echo.",
    "solutions": ["print(input())"],
    "input_output": '{"inputs": ["a\\n"], "outputs": ["a\\n"]}',
}
ROWS: dict[Problems, dict[str, Any]] = {
    "gsm8k": GSM8K,
    "math": MATH,
    "humaneval": HUMANEVAL,
    "mbpp": MBPP,
    "countdown": COUNTDOWN,
    "areal_math": AREAL_MATH,
    "areal_code": AREAL_CODE,
}


def made(problems: Problems, values: dict[str, Any], template: str | None = None) -> dict[str, Any]:
    return dict(as_problem(Row(source="set.jsonl", number=4, values=values), problems, template).values)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_gsm8k_gives_the_number_behind_the_mark_and_a_solution_without_the_calculator() -> None:
    found = made("gsm8k", GSM8K)
    assert found == {
        "prompt": "How many?\nThink step by step, then write the final number after ####.",
        "answer": "1024",
        "response": "Half of 48 is 24.\n#### 1,024",
    }


def test_math_takes_the_answer_column_or_else_the_last_box_of_the_solution() -> None:
    assert made("math", MATH)["answer"] == r"\frac{1}{2}"
    boxed = {"problem": "?", "solution": r"First \boxed{1}, then $\boxed{\sqrt{2}}$ and \boxed{open"}
    assert made("math", boxed)["answer"] == r"\sqrt{2}"
    assert made("math", MATH)["prompt"].endswith(r"put the final answer within \boxed{}.")
    assert made("math", MATH)["level"] == 3


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{1} \boxed{ 2 }", "2"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed 3", None),
        ("}{", None),
        (r"\boxed{}", ""),
        (r"\boxed{1 + \boxed{2}}", "2"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a \\ {b}}", r"a \\ {b}"),
        (r"} \boxed{1}}", "1"),
        (r"$\\boxed{42}$", "42"),
        (r"so \boxed{5}. (Old: \fbox{note})", "5"),
        (r"\boxed{1} then \boxed x", "1"),
    ],
)
def test_the_last_box_that_is_closed_counts(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


def test_a_text_is_searched_for_boxes_once_however_many_never_close(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    pattern = Mock(finditer=lambda text: (searched.append(text), BRACE.finditer(text))[1])
    monkeypatch.setattr("proximo.data.readers.problems.BRACE", pattern)
    assert last_boxed("\\boxed{" * 20_000) is None
    assert last_boxed("\\boxed{" * 20_000 + "1" + "}" * 20_000) == "1"
    assert len(searched) == 2


def test_humaneval_asks_for_the_rest_of_the_function_and_keeps_its_beginning_for_the_judge() -> None:
    found = made("humaneval", HUMANEVAL)
    assert found["prompt"] == found["stub"] == HUMANEVAL["prompt"]
    assert (found["id"], found["response"], found["entry_point"]) == ("HumanEval/7", "    return x + y\n", "add")
    asked = made("humaneval", HUMANEVAL, "Complete {entry_point}:\n{prompt}")
    assert asked["prompt"] == f"Complete add:\n{HUMANEVAL['prompt']}"
    assert asked["stub"] == HUMANEVAL["prompt"]


@pytest.mark.parametrize("row", [MBPP, SANITIZED], ids=["full", "sanitized"])
def test_mbpp_names_the_function_that_is_tested_and_has_line_ends_of_today(row: dict[str, Any]) -> None:
    found = made("mbpp", row)
    assert found["prompt"] == (
        "Write a function to add.\nThe function is called add and must pass this test:\nassert add(1, 2) == 3\n"
        "Answer with the function in one block of Python code."
    )
    assert found["response"] == "def helper(x):\n    return x\ndef add(x, y):\n    return x + y"
    assert (found["id"], found["test_list"]) == ("11", row["test_list"])
    assert found.get("test_imports") == row.get("test_imports")
    assert made("mbpp", row, "{text} {tests}")["prompt"].count("assert") == 2


def test_countdown_shows_its_numbers_and_keeps_them_for_the_judge() -> None:
    found = made("countdown", COUNTDOWN)
    assert found["prompt"].startswith("Use each of the numbers 3, 5, 7 exactly once")
    assert "make 26" in found["prompt"]
    assert (found["nums"], found["target"], found["response"]) == ([3, 5, 7], 26, "(3 * 7) + 5")
    assert made("countdown", COUNTDOWN, "{nums} -> {target}")["prompt"] == "[3, 5, 7] -> 26"
    assert "response" not in made("countdown", {"nums": [1], "target": 1})


def test_areal_rows_give_answers_or_test_cases() -> None:
    maths = made("areal_math", AREAL_MATH)
    assert maths == {"prompt": "What?", "answer": "4", "answers": ["4", "4.0"], "id": "q1"}
    code = made("areal_code", AREAL_CODE)
    assert code["input_output"] == {"inputs": ["a\n"], "outputs": ["a\n"]}
    assert (code["prompt"], code["id"], code["response"]) == ("Echo.", "q2", "print(input())")
    older = {"id": 3, "question": "Echo?", "input_output": {"inputs": [1], "outputs": [1], "fn_name": "f"}}
    assert made("areal_code", older)["prompt"] == "Echo?"
    assert made("areal_code", older)["input_output"]["fn_name"] == "f"


@pytest.mark.parametrize(
    ("problems", "changes", "message"),
    [
        ("gsm8k", {"answer": "It is 5."}, "must end in #### and a number"),
        ("gsm8k", {"answer": "#### five"}, "must end in #### and a number"),
        ("gsm8k", {"question": 5}, "'question' must be text"),
        ("math", {"answer": None, "solution": "It is 5."}, "no reference answer"),
        ("math", {"answer": "", "solution": ""}, "no reference answer"),
        ("humaneval", {"test": "assert add(1, 2) == 3"}, "column 'test' check(candidate)"),
        ("humaneval", {"entry_point": "sub"}, "must define 'sub'"),
        ("mbpp", {"test_list": []}, "'test_list' must be a list of texts"),
        ("mbpp", {"test_list": "assert add(1, 2) == 3"}, "'test_list' must be a list of texts"),
        ("mbpp", {"code": "add = sum"}, "defines no function that the tests call"),
        ("countdown", {"nums": []}, "countdown wants whole numbers"),
        ("countdown", {"nums": [1, True]}, "countdown wants whole numbers"),
        ("countdown", {"target": 2.5}, "countdown wants whole numbers"),
        ("areal_math", {"task": "code"}, "a row of task 'code' in a source of math"),
        ("areal_math", {"solutions": []}, "'solutions' must be a list of texts"),
        ("areal_math", {"solutions": ["4", " "]}, "a text of column 'solutions' is empty"),
        ("areal_code", {"input_output": "{"}, "is not JSON"),
        ("areal_code", {"input_output": '{"inputs": []}'}, "must hold lists inputs and outputs"),
        ("areal_code", {"input_output": {"inputs": ["a"], "outputs": []}}, "of 1 and 0 entries"),
        ("areal_code", {"input_output": {"inputs": [], "outputs": []}}, "of 0 and 0 entries"),
    ],
)
def test_a_row_that_does_not_fit_is_one_error_with_file_and_row(
    problems: Problems, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=r"^set\.jsonl, row 4: ") as caught:
        made(problems, ROWS[problems] | changes)
    assert message in str(caught.value)


def test_a_name_that_a_template_cannot_fill_is_named_with_the_nearest() -> None:
    with pytest.raises(DataError, match="no column 'qestion'.*nearest: 'question'"):
        made("gsm8k", GSM8K, "{qestion}")


def test_columns_are_renamed_before_the_rows_are_read_as_problems(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [{"ask": "How many?", "answer": "#### 3", "id": "first"}])
    (row,) = load_rows([DataSource(path=str(path), problems="gsm8k", columns={"question": "ask"})]).rows
    assert (row.values["answer"], row.values["id"]) == ("3", "first")


@pytest.mark.parametrize("problems", ROWS)
def test_what_a_problem_says_beside_its_columns_is_read_or_refused(problems: Problems) -> None:
    def asked(columns: dict[str, Any], template: str | None = None, **mapped: str) -> str:
        row = with_columns(Row(source="set.jsonl", number=1, values=ROWS[problems] | columns), mapped)
        prompts, _ = load_prompts([as_problem(row, problems, template)], chatml, PromptOptions(as_messages=True))
        return chatml.decode(list(prompts[0].token_ids))

    chatml = FAMILIES["chatml"].tokenizer()
    system = {"system": "Think in French."}
    assert asked(system).startswith("<|im_start|>system\nThink in French.<|im_end|>\n<|im_start|>user\n")
    assert asked(system, "{system} 1 + 1?").startswith("<|im_start|>user\nThink in French. 1 + 1?")
    assert asked(system, extra="{system}").startswith("<|im_start|>user\n"), "a template of columns has taken it"
    assert asked({"history": [["One?", "1"]]}).startswith("<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n1")
    for columns, told in (
        ({"images": ["a.png"]}, r"set.jsonl, row 1: column 'images' holds .*text only"),
        ({"tools": 5}, r"set.jsonl, row 1: column 'tools'"),
        ({"chat_template_kwargs": 5}, r"set.jsonl, row 1: column 'chat_template_kwargs' must be an object"),
    ):
        with pytest.raises(DataError, match=told):
            asked(columns)
    assert asked({"images": ["a.png"]}, "{images}").startswith('<|im_start|>user\n["a.png"]')


REAL: tuple[tuple[Problems, str, int], ...] = (
    ("gsm8k", "gsm8k/train.jsonl", 7473),
    ("gsm8k", "gsm8k/test_dev.jsonl", 659),
    ("math", "math/math500_dev.jsonl", 250),
    ("humaneval", "humaneval/humaneval_dev.jsonl", 82),
    ("mbpp", "mbpp/mbpp_dev.jsonl", 724),
    ("mbpp", "mbpp/sanitized_mbpp_dev.json", 298),
    ("countdown", "countdown/countdown_dev.jsonl", 2000),
)


@pytest.mark.parametrize(("problems", "file", "count"), REAL, ids=str)
def test_every_row_of_the_real_files_becomes_a_problem(problems: Problems, file: str, count: int) -> None:
    rows = load_rows([DataSource(path=str(real_data(file)), problems=problems)]).rows
    assert len(rows) == count
    prompts = {row.values["prompt"] for row in rows}
    assert len(prompts) > 0.99 * count
    for row in rows:
        assert row.values["response"].strip()
        assert "\r" not in row.values["prompt"] + row.values["response"]
        if problems == "gsm8k":
            float(row.values["answer"])
            assert "<<" not in row.values["response"]


def test_the_math_answers_are_those_in_the_boxes_of_their_solutions() -> None:
    """The column and the box agree but for spaces, so that a file without the column gives the same references."""
    path = real_data("math/math500_dev.jsonl")
    rows = load_rows([DataSource(path=str(path), problems="math")]).rows
    without = load_rows([DataSource(path=str(path), problems="math", columns={"answer": ""})]).rows
    squeezed = [
        (a.values["answer"].replace(" ", ""), b.values["answer"].replace(" ", ""))
        for a, b in zip(rows, without, strict=True)
    ]
    assert sum(first == second for first, second in squeezed) >= 245
