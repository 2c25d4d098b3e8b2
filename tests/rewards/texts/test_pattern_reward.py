"""Rewards for a regular expression: what counts as a match, and the limit of time."""

import time
from typing import Any

import pytest

from proximo.errors import ConfigError
from proximo.rewards.text_verifiers import PatternVerifier
from proximo_verifiers.verifier import Answer, Grade, ScoreState


def grade(text: str, pattern: str, **options: Any) -> Grade:
    return PatternVerifier(pattern=pattern, **options).grade(Answer(text=text, prompt="?"))


@pytest.mark.parametrize(
    ("text", "pattern", "options", "score"),
    [
        ("it is 42.", r"\d+", {}, 1.0),
        ("it is 42.", r"\d+", {"match": "full"}, 0.0),
        ("42", r"\d+", {"match": "full"}, 1.0),
        ("42\n", r"\d+", {"match": "full"}, 0.0),
        ("no number", r"\d+", {}, 0.0),
        ("no number", r"\d+", {"no_match_score": -1}, -1.0),
        ("1 2 3", r"\d", {}, 1.0),
        ("1 2 3", r"\d", {"max_matches": 2}, 2.0),
        ("1 2 3", r"\d", {"max_matches": 3, "match_score": -0.5}, -1.5),
        ("1 2 3", r"\d", {"max_matches": 9}, 3.0),
        ("aaaa", "aa", {"max_matches": 9}, 2.0),
        ("", "", {"match": "full"}, 1.0),
        ("Émile", r"(?i)^\p{L}+$", {}, 1.0),
    ],
)
def test_the_score_is_that_of_the_matches_that_count(text: str, pattern: str, options: dict, score: float) -> None:
    assert grade(text, pattern, **options).score == score


@pytest.mark.parametrize("match", ["full", "search"])
def test_a_search_without_an_end_is_given_up_in_time_and_is_the_answers_fault(match: Any) -> None:
    started = time.process_time()
    found = grade("a" * 64 + "!", r"^(a|a)*(a|a)*(a|aa)+$", match=match, match_seconds=0.2, no_match_score=-1)
    assert time.process_time() - started < 1
    assert (found.score, found.state) == (-1.0, ScoreState.MODEL_FAULT)
    assert found.reason == "the pattern took more than 0.2 s"


def test_what_is_no_expression_is_refused_with_the_place() -> None:
    with pytest.raises(ConfigError, match=r"'a\(b' is not a regular expression: missing \) at character 4"):
        PatternVerifier(pattern="a(b")
