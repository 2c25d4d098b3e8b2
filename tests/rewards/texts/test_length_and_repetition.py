"""Rewards of length and penalties of repetition, at the borders of their ranges."""

from typing import Any

import pytest

from proximo.rewards.text_verifiers import LengthVerifier, RepetitionVerifier, repeated_share
from proximo_verifiers.verifier import Answer, Grade


def words(count: int) -> Answer:
    return Answer(text=" ".join("w" * 3 for _ in range(count)), prompt="?", num_tokens=2 * count)


@pytest.mark.parametrize(
    ("length", "score"), [(0, 0.0), (5, 0.0), (6, 0.2), (9, 0.8), (10, 1.0), (20, 1.0), (21, 0.8), (25, 0.0), (99, 0.0)]
)
def test_the_range_is_inclusive_and_the_score_falls_linearly_outside(length: int, score: float) -> None:
    found = LengthVerifier(shortest=10, longest=20, slack=5).grade(words(length))
    assert found.score == pytest.approx(score, abs=1e-12)
    assert found.components == {"length": float(length)}


def test_without_slack_the_score_is_one_or_zero() -> None:
    verifier = LengthVerifier(shortest=10, longest=20)
    assert [verifier.grade(words(n)).score for n in (9, 10, 20, 21)] == [0, 1, 1, 0]


def test_one_side_may_be_open_and_both_may_be_one_target() -> None:
    assert [LengthVerifier(shortest=3).grade(words(n)).score for n in (2, 3, 1000)] == [0, 1, 1]
    assert [LengthVerifier(longest=3).grade(words(n)).score for n in (0, 3, 4)] == [1, 1, 0]
    target = LengthVerifier(shortest=4, longest=4, slack=4)
    assert [target.grade(words(n)).score for n in (0, 2, 4, 5, 8)] == [0, 0.5, 1, 0.75, 0]


@pytest.mark.parametrize(("unit", "length"), [("words", 3), ("characters", 11), ("tokens", 6)])
def test_what_is_counted(unit: Any, length: int) -> None:
    assert LengthVerifier(unit=unit, shortest=0).grade(words(3)).components == {"length": float(length)}


def repetition(text: str, **options: Any) -> Grade:
    return RepetitionVerifier(**options).grade(Answer(text=text, prompt="?"))


@pytest.mark.parametrize(
    ("text", "n", "share"),
    [
        ("", 1, 0),
        ("a", 1, 0),
        ("a", 2, 0),
        ("a a", 1, 1 / 2),
        ("a a a a", 1, 3 / 4),
        ("a a a a", 2, 2 / 3),
        ("a b a b", 2, 1 / 3),
        ("a b c d", 2, 0),
        ("a b c a b c", 3, 1 / 4),
        ("a b c", 4, 0),
    ],
)
def test_the_share_is_that_of_ngrams_that_came_before(text: str, n: int, share: float) -> None:
    grams = [tuple(text.split()[i : i + n]) for i in range(len(text.split()) - n + 1)]
    assert sum(gram in grams[:i] for i, gram in enumerate(grams)) / max(1, len(grams)) == pytest.approx(share)
    assert repeated_share(text.split(), n) == pytest.approx(share)
    assert repetition(text, ngram=n).score == pytest.approx(-share)


def test_a_text_without_repetition_scores_zero_and_not_minus_zero() -> None:
    assert str(repetition("all of these words differ from each other").score) == "0.0"


def test_characters_serve_languages_without_blanks() -> None:
    assert repetition("哈哈哈哈", unit="characters", ngram=2).score == pytest.approx(-2 / 3)
    assert repetition("哈哈哈哈", unit="words", ngram=2).score == 0
