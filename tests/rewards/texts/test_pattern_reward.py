"""Rewards for a regular expression: what counts as a match, and the limit of time."""

from typing import Any

import pytest

from proximo.config.rewards.verifiers import PatternRewardConfig
from proximo.errors import ConfigError
from proximo.rewards import text_verifiers
from proximo.rewards.text_verifiers import PatternVerifier
from proximo_verifiers.verifier import Answer, Grade, ScoreState


def grade(text: str, pattern: str, **options: Any) -> Grade:
    return PatternVerifier(pattern=pattern, **options).grade(Answer(text=text, prompt="?"))


@pytest.mark.parametrize(
    ("text", "pattern", "options", "score"),
    [
        ("it is 42.", r"\d+", {}, 1.0),
        ("it is 42.", r"\A\d+\Z", {}, 0.0),
        ("42", r"\A\d+\Z", {}, 1.0),
        ("42\n", r"\A\d+\Z", {}, 0.0),
        ("no number", r"\d+", {}, 0.0),
        ("no number", r"\d+", {"no_match_score": -1}, -1.0),
        ("1 2 3", r"\d", {"match_score": -0.5}, -0.5),
        ("", r"\A\Z", {}, 1.0),
        ("Émile", r"(?i)^\p{L}+$", {}, 1.0),
    ],
)
def test_a_match_decides_the_score(text: str, pattern: str, options: dict, score: float) -> None:
    assert grade(text, pattern, **options).score == score


@pytest.mark.parametrize("scores", [{"no_match_score": -1.0}, {"match_score": -1.0}])
def test_a_search_without_an_end_is_given_up_and_gets_the_lower_score(
    scores: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_verifiers, "MATCH_SECONDS", 0.1)
    found = grade("a" * 64 + "!", r"^(a|a)*(a|a)*(a|aa)+$", **scores)
    assert (found.score, found.state) == (-1.0, ScoreState.MODEL_FAULT)
    assert found.reason == "the pattern took more than 0.1 s"


def test_what_is_no_expression_is_refused_with_the_place() -> None:
    with pytest.raises(ConfigError, match=r"'a\(b' is not a regular expression: missing \) at character 4"):
        PatternRewardConfig(kind="pattern", pattern="a(b")
