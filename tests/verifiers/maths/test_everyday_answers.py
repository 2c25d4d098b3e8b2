"""Answers as they are really written: each pair is graded both ways round, each response by the sources' defaults."""

import pytest
from everyday_answers import DIFFERENT, RIGHT_RESPONSES, SAME, WRONG_RESPONSES
from maths_verifiers import graded

from proximo_verifiers.maths.symbols import is_installed

WAYS = [
    "never",
    pytest.param("always", marks=pytest.mark.skipif(not is_installed(), reason="the extra maths is not installed")),
]
SYMBOLIC_ALONE = ("\\log", "\\ln", "\\sin", ":")
"""Functions and ratios are left to math-verify."""


def test_the_table_is_as_long_as_it_is_meant_to_be() -> None:
    rows = [*SAME, *DIFFERENT, *RIGHT_RESPONSES, *WRONG_RESPONSES]
    assert len(set(rows)) == len(rows) >= 500


@pytest.mark.parametrize("symbolic", WAYS)
def test_the_same_answer_is_right_whichever_of_the_two_is_the_reference(symbolic: str) -> None:
    pairs = [pair for pair in SAME if symbolic == "always" or not any(mark in "".join(pair) for mark in SYMBOLIC_ALONE)]
    wrong = [pair for pair in both_ways(pairs) if score(*pair, symbolic) != 1.0]
    assert wrong == []


@pytest.mark.parametrize("symbolic", WAYS)
def test_another_answer_is_wrong_whichever_of_the_two_is_the_reference(symbolic: str) -> None:
    assert [pair for pair in both_ways(DIFFERENT) if score(*pair, symbolic) != 0.0] == []


def test_a_right_answer_is_found_in_the_sentence_that_states_it() -> None:
    assert [row for row in RIGHT_RESPONSES if graded(row[1], row[0], symbolic="never").score != 1.0] == []


def test_a_number_that_only_stands_beside_the_answer_is_not_taken_for_it() -> None:
    assert [row for row in WRONG_RESPONSES if graded(row[1], row[0], symbolic="never").score != 0.0] == []


def both_ways(pairs: list[tuple[str, str]] | tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    return [way for one, other in pairs for way in ((one, other), (other, one))]


def score(reference: str, answer: str, symbolic: str) -> float:
    return graded(f"\\boxed{{{answer}}}", reference, symbolic=symbolic, symbolic_cpu_seconds=10.0).score
