"""The verifier of mathematical answers: its grades, its options, and the rows that it refuses."""

import math
import subprocess
import sys
from inspect import signature
from typing import Any

import pytest
from maths_verifiers import graded, maths_verifier

import proximo_verifiers.maths.symbols as symbols_module
import proximo_verifiers.maths.verifier as verifier_module
from proximo_verifiers.errors import DataError, MissingExtraError
from proximo_verifiers.maths.verifier import MathsVerifier
from proximo_verifiers.verifier import Answer, ScoreState

NOTHING_FOUND = {"parsed": 0.0, "by_symbols": 0.0, "undecided": 0.0}


def test_right_and_wrong_answers_are_scored_and_a_missing_one_is_the_models_fault() -> None:
    right, wrong, missing = (graded(text, "5") for text in ("\\boxed{5}", "\\boxed{6}", "five"))
    assert (right.score, right.state, right.reason) == (1.0, ScoreState.SCORED, None)
    assert (wrong.score, wrong.state, wrong.reason) == (0.0, ScoreState.SCORED, None)
    assert (missing.score, missing.state, missing.reason) == (0.0, ScoreState.MODEL_FAULT, "no answer found")
    assert right.components == wrong.components == {"parsed": 1.0, "by_symbols": 0.0, "undecided": 0.0}
    assert missing.components == NOTHING_FOUND


def test_an_answer_that_nobody_computes_is_wrong_and_says_why() -> None:
    grade = graded("\\boxed{1/0}", "5", incorrect_score=-1.0, no_answer_score=-2.0)
    assert (grade.score, grade.state, grade.reason) == (-1.0, ScoreState.MODEL_FAULT, "a division by 0")


def test_an_answer_that_nobody_can_compare_is_wrong_and_counted() -> None:
    grade = graded("\\boxed{2 \\sin x}", "\\sin x")
    assert (grade.score, grade.state) == (0.0, ScoreState.SCORED)
    assert grade.components["undecided"] == 1.0


OPTIONS: tuple[tuple[str, Any, dict[str, Any], str, str], ...] = (
    ("answer_from", ["label"], {}, "\\boxed{6}\nA: 5", "5"),
    ("multiple_answers", "first", {}, "\\boxed{5} \\boxed{6}", "5"),
    ("multiple_answers", "agree", {}, "\\boxed{6} \\boxed{5}", "5"),
    ("pattern", "=(.)", {"answer_from": ["pattern"], "pattern": ":(.)"}, "=5 :6", "5"),
    ("relative_tolerance", 0.01, {}, "\\boxed{3.14}", "\\pi"),
    ("correct_score", 2.0, {}, "\\boxed{5}", "5"),
    ("incorrect_score", -1.0, {}, "\\boxed{6}", "5"),
    ("no_answer_score", -1.0, {}, "five", "5"),
)
"""An option, another value of it, what holds in both cases, and a response and reference on which it shows."""
ELSEWHERE = {
    "symbolic": "test_always_demands_the_extra_when_the_verifier_is_made_and_auto_does_without",
    "symbolic_cpu_seconds": "test_math_verify_is_stopped_after_its_processor_time, in test_math_verify.py",
}


@pytest.mark.parametrize(("name", "value", "base", "text", "reference"), OPTIONS)
def test_an_option_of_the_maths_verifier_changes_a_grade(
    name: str, value: Any, base: dict[str, Any], text: str, reference: str
) -> None:
    assert graded(text, reference, **base) != graded(text, reference, **{**base, name: value})


def test_every_option_of_the_maths_verifier_is_shown() -> None:
    assert set(signature(MathsVerifier).parameters) == {name for name, *_ in OPTIONS} | set(ELSEWHERE)


def test_several_boxes_that_agree_may_be_written_differently() -> None:
    assert graded("\\boxed{1/2} or \\boxed{0.5}", "\\frac12", multiple_answers="agree").score == 1.0
    differing = graded("\\boxed{1/2} or \\boxed{0.6}", "\\frac12", multiple_answers="agree")
    assert (differing.state, differing.reason) == (ScoreState.MODEL_FAULT, "several answers that differ")
    many = "".join(f"\\boxed{{{n}/{n}}}" for n in range(1, 40))
    assert graded(many, "1", multiple_answers="agree").state is ScoreState.MODEL_FAULT


SEVERAL = {"answers": ["4", "-4", "\\sin x"]}


def test_an_answer_that_equals_any_of_several_references_is_right() -> None:
    texts = ("4", "8/2", "-4.0", "\\sin x", "5")
    assert [graded(f"\\boxed{{{each}}}", "4", metadata=SEVERAL).score for each in texts] == [1.0] * 4 + [0.0]
    assert graded("\\boxed{-4}", None, metadata=SEVERAL).score == 1.0
    undefined = graded("\\boxed{1/0}", "4", metadata=SEVERAL, symbolic="never")
    assert (undefined.score, undefined.reason) == (0.0, "a division by 0")
    assert graded("\\boxed{5}", "4", metadata={"answers": None}).score == 0.0


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ("4", "must be a list of reference answers"),
        ({"text": ["4"]}, "must be a list of reference answers"),
        (["4", 5], "must be a list of reference answers"),
        (["4", "x" * 1001], "the answer alone"),
        (["4", " "], "is empty after cleaning"),
        ([str(n) for n in range(101)], "the limit is 100"),
    ],
)
def test_a_list_of_references_that_cannot_be_compared_with_is_refused(answers: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        maths_verifier().check_row("4", {"answers": answers})


ROWS = (
    (None, "has none"),
    ("x" * 1001, "the answer alone"),
    ("", "is empty after cleaning"),
    (" $ $ ", "is empty after cleaning"),
)


@pytest.mark.parametrize(("reference", "message"), ROWS)
def test_a_row_that_no_answer_can_be_graded_by_is_refused(reference: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        maths_verifier().check_row(reference, {})


def test_a_row_with_a_reference_is_taken_even_where_only_math_verify_could_read_it() -> None:
    maths_verifier().check_row("\\sin x", {})
    with pytest.raises(DataError, match="needs a reference answer"):
        maths_verifier().grade(Answer(text="\\boxed{5}", prompt=""))


def test_always_demands_the_extra_when_the_verifier_is_made_and_auto_does_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(symbols_module, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="math-verify>=0.9"):
        maths_verifier(symbolic="always")
    assert graded("\\boxed{\\cos x}", "\\sin x", symbolic="auto").components["undecided"] == 1.0


def test_what_nobody_here_decides_is_left_to_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Symbols:
        def __init__(self, cpu_seconds: float) -> None:
            assert cpu_seconds == 0.8

        def any_same(self, references: list[str], answer: str) -> bool | None:
            asked.append((references, answer))
            return {"\\cos x": False, "\\sin{x}": True}.get(answer)

    monkeypatch.setattr(verifier_module, "SymbolicComparison", Symbols)
    grades = [graded(f"\\boxed{{{each}}}", "\\sin x", symbolic="always") for each in ("\\cos x", "\\sin{x}", "\\tan x")]
    assert [grade.score for grade in grades] == [0.0, 1.0, 0.0]
    assert [grade.components["by_symbols"] for grade in grades] == [1.0, 1.0, 0.0]
    assert [grade.components["undecided"] for grade in grades] == [0.0, 0.0, 1.0]
    assert graded("\\boxed{5}", "6", symbolic="always").score == 0.0
    assert len(asked) == 3
    several = {"answers": ["5", "\\tan x", "\\sin x"]}
    assert graded("\\boxed{\\sin{x}}", "\\sin x", symbolic="always", metadata=several).score == 1.0
    assert asked[3] == (["\\sin x", "5", "\\tan x"], "\\sin{x}")


def test_the_grade_of_a_worker_that_was_killed_has_the_score_of_a_wrong_answer() -> None:
    grade = maths_verifier(incorrect_score=-1.0).timeout_grade()
    assert (grade.score, grade.state) == (-1.0, ScoreState.MODEL_FAULT)
    assert all(math.isfinite(each) for each in grade.components.values())


def test_a_worker_loads_nothing_large_for_it() -> None:
    code = (
        "import sys, proximo_verifiers.maths.verifier, proximo_verifiers.maths.countdown;"
        "print([name for name in ('torch', 'transformers', 'pydantic', 'numpy', 'sympy', 'math_verify')"
        " if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
