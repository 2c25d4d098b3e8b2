"""Countdown: an expression of the given numbers, parsed and computed exactly."""

import json
import random
from fractions import Fraction
from inspect import signature
from typing import Any

import pytest
from maths_verifiers import countdown_verifier

from proximo_verifiers.errors import DataError
from proximo_verifiers.maths.countdown import CountdownVerifier, Expression, MalformedError, _plain, _read
from proximo_verifiers.verifier import Answer, Grade, ScoreState
from real_data import real_data

PROBLEM = {"nums": [68, 34, 21, 27], "target": 40}
SOLUTION = "(68 - (34 + 21)) + 27"


def read_expression(text: str) -> Expression:
    return _read(_plain(text))


def graded(text: str, problem: dict[str, Any] = PROBLEM, **options: Any) -> Grade:
    return countdown_verifier(**options).grade(Answer(text=text, prompt="", metadata=problem))


RIGHT = (
    SOLUTION,
    f"Let me see.\n{SOLUTION}",
    f"<answer>{SOLUTION}</answer>",
    f"<answer>1+1</answer> no: <answer>\n{SOLUTION} = 40\n</answer>",
    f"so \\boxed{{{SOLUTION}}} it is",
    f"{SOLUTION} = 40.",
    f"x = {SOLUTION} = 40",
    f"$${SOLUTION}$$",
    "68 \N{MINUS SIGN} (34 + 21) + 27",
    "\\left(68 - (34 + 21)\\right) + 27",
    "27 + 68 - 34 - 21",
    f"40 = {SOLUTION}",
    f"{SOLUTION} = 13 + 27 = 40",
    f"$${SOLUTION} = 40.0$$",
    f"**{SOLUTION} = 40**",
)
WRONG = ("68 + 34 + 21 + 27", "68 - 34 - 21", "68 - 34 - 21 + 27 + 0", "40", "40 * 68 / 68", "68 - 34 - 21 + 27 / 1")
UNTRUE = (f"{SOLUTION} = 99", f"{SOLUTION} = -40", f"99 = {SOLUTION}", f"{SOLUTION} = 40 = 41", "1 / (3 - 3) = 40")
MALFORMED = ("", "1 +", "(1", "1)", "68 34", "-68 + 34", "68 - -34", "2 ** 3", "6.8", "1,000", "a + b", "68 // 2", "()")
MALFORMED += ("1 (2)", "\\frac{1)+(2}{3}", "2\\frac{1}{2}", "68 # 34", "6_8", "68 * * 2", "\\frac{1}")
MALFORMED += ("x = 40.0", f"{SOLUTION} = ?", f"{SOLUTION} =", f"{SOLUTION} == 40", "-40")
MALFORMED += ("-" * 335 + "1", "+" * 499 + "1", "(" + "-" * 330 + "1)", "1+" + "-" * 400 + "1")
MALFORMED += ("x = " + "-" * 400 + "5", "x = " + "\N{EN DASH}" * 400 + "5", "1" + "(" * 240 + ")" * 240)


@pytest.mark.parametrize("text", RIGHT)
def test_an_expression_is_found_and_right_however_it_is_written(text: str) -> None:
    assert graded(text).score == 1.0


@pytest.mark.parametrize("text", WRONG)
def test_an_expression_with_another_value_or_other_numbers_is_wrong(text: str) -> None:
    grade = graded(text)
    assert (grade.score, grade.state, grade.components["well_formed"]) == (0.0, ScoreState.SCORED, 1.0)


@pytest.mark.parametrize("text", UNTRUE)
def test_an_equation_that_does_not_hold_is_wrong_whatever_its_expression_is_worth(text: str) -> None:
    grade = graded(text, incorrect_score=0.1)
    assert (grade.score, grade.state) == (0.1, ScoreState.MODEL_FAULT)
    assert grade.reason == "a false equation"
    assert grade.components["well_formed"] == 1.0


def test_an_answer_that_is_too_long_is_refused_whole_and_says_so() -> None:
    hidden = f"<answer>{SOLUTION}{' ' * 1000}= 99</answer>"
    for text in (hidden, f"<answer>{SOLUTION} + 1{' ' * 1000}- 1</answer>", f"{SOLUTION}{' ' * 1000}+ 1"):
        grade = graded(text)
        assert (grade.score, grade.state) == (0.0, ScoreState.MODEL_FAULT)
        assert grade.reason == "not an expression: more than 1000 characters"
    assert graded(f"{SOLUTION}{' ' * 400} = 40").score == 1.0


def test_a_value_that_is_only_stated_is_no_solution() -> None:
    assert graded("x = 40.0", number_usage="at_most_once").score == 0.0
    assert graded("0.0 = 40 - 40", {"nums": [40], "target": 0}, number_usage="at_most_once").score == 0.0


@pytest.mark.parametrize("text", MALFORMED)
def test_what_is_no_expression_is_the_models_fault(text: str) -> None:
    grade = graded(text)
    assert (grade.score, grade.state) == (0.0, ScoreState.MODEL_FAULT)
    assert grade.components == {"well_formed": 0.0, "numbers_correct": 0.0}
    assert grade.reason


def test_the_components_say_what_was_right() -> None:
    assert graded("68 + 34 + 21 + 27").components == {"well_formed": 1.0, "numbers_correct": 1.0}
    assert graded("40").components == {"well_formed": 1.0, "numbers_correct": 0.0}


def test_fractions_are_exact_and_a_division_by_zero_is_a_wrong_answer() -> None:
    thirds = {"nums": [1, 3, 3], "target": 1}
    assert graded("1 / 3 * 3", thirds).score == 1.0
    assert graded("\\frac{1}{3} \\times 3", thirds).score == 1.0
    zero = graded("1 / (3 - 3)", thirds)
    assert (zero.score, zero.components["numbers_correct"]) == (0.0, 1.0)


OPTIONS: tuple[tuple[str, Any, str, dict[str, Any]], ...] = (
    ("answer_from", ["response"], "68 - (34 + 21)\n+ 27", PROBLEM),
    ("number_usage", "at_most_once", "1 + 2", {"nums": [1, 2, 5], "target": 3}),
    ("operators", ["+"], "3 - 2", {"nums": [3, 2], "target": 1}),
    ("correct_score", 2.0, SOLUTION, PROBLEM),
    ("incorrect_score", 0.1, "68 + 34", PROBLEM),
    ("no_answer_score", -1.0, "no", PROBLEM),
)


@pytest.mark.parametrize(("name", "value", "text", "problem"), OPTIONS)
def test_an_option_of_the_countdown_verifier_changes_a_grade(
    name: str, value: Any, text: str, problem: dict[str, Any]
) -> None:
    assert graded(text, problem) != graded(text, problem, **{name: value})


def test_every_option_of_the_countdown_verifier_is_shown() -> None:
    assert set(signature(CountdownVerifier).parameters) == {name for name, *_ in OPTIONS}


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ({"target": 3}, "column 'nums'"),
        ({"nums": "1 2", "target": 3}, "column 'nums'"),
        ({"nums": [1, 2.5], "target": 3}, "column 'nums'"),
        ({"nums": [], "target": 3}, "column 'nums'"),
        ({"nums": [1, True], "target": 3}, "column 'nums'"),
        ({"nums": [1, 2]}, "column 'target'"),
        ({"nums": [1, 2], "target": "3"}, "column 'target'"),
    ],
)
def test_a_row_without_numbers_or_target_is_refused(problem: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        countdown_verifier().check_row(None, problem)


def test_bounds_are_looked_at_before_anything_is_computed() -> None:
    for text in ("1234567890", "(" * 240 + "1" + ")" * 240, "+".join("1" * 61), "1" + " " * 600):
        with pytest.raises(MalformedError):
            read_expression(text)


def random_expression(draw: random.Random, depth: int) -> tuple[str, Fraction | None]:
    """An expression and its value, computed beside it."""
    if depth == 0 or draw.random() < 0.2:
        number = draw.randrange(0, 30)
        return str(number), Fraction(number)
    (left, one), (right, other) = (random_expression(draw, depth - 1) for _ in range(2))
    operator = draw.choice("+-*/")
    text = f"({left} {operator} {right})"
    if one is None or other is None or (operator == "/" and other == 0):
        return text, None
    return text, {"+": one + other, "-": one - other, "*": one * other, "/": one / (other or 1)}[operator]


def test_random_expressions_have_the_value_of_their_definition() -> None:
    draw = random.Random(4)
    for _ in range(400):
        text, value = random_expression(draw, 4)
        assert read_expression(text).value == value, text


def test_precedence_is_that_of_arithmetic() -> None:
    assert read_expression("2 + 3 * 4 - 6 / 3 - 1").value == 11
    assert read_expression("8 / 4 / 2").value == 1
    assert read_expression("8 - 4 - 2").value == 2


def test_numbers_are_in_their_order_in_the_text() -> None:
    for text in ("1 + 2 * 3 + 4", "\\frac{1 + 2}{3} - (4)"):
        assert read_expression(text).numbers == (1, 2, 3, 4)


def test_all_given_solutions_verify_and_none_does_with_a_number_or_operator_changed() -> None:
    lines = real_data("countdown", "countdown_dev.jsonl").read_text().splitlines()
    problems = [json.loads(line) for line in lines]
    assert len(problems) == 2000
    draw = random.Random(5)
    for problem in problems:
        solution = problem["solution"]
        assert graded(solution, problem).score == 1.0, problem
        number = str(draw.choice(problem["nums"]))
        assert graded(solution.replace(number, f"{int(number) + 1}", 1), problem).score == 0.0, problem
        assert graded(f"{solution} + 0", problem).score == 0.0, problem
        assert graded(solution, problem | {"target": problem["target"] + 1}).score == 0.0, problem
        assert graded(solution, problem | {"nums": [*problem["nums"], 1]}).score == 0.0, problem
