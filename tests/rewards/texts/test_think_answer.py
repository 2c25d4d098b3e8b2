"""The form of think and answer: what is well-formed, AReaL's table, and what a verifier within it is shown."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import pytest

from proximo.config.rewards.verifiers import ThinkAnswerRewardConfig
from proximo.errors import ConfigError, DataError
from proximo.rewards.text_verifiers import ThinkAnswerVerifier, form_problem
from proximo_verifiers.verifier import Answer, Grade, ScoreState, Verifier

GOOD = "<think>two and two</think>\n<answer>4</answer>"
FORTY_TWO = {"verifier": "proximo.rewards.text_verifiers:PatternVerifier", "options": {"pattern": "42"}}
AREAL = {"verifier": FORTY_TWO, "min_score": -1.0}


def grade(text: str, **options: Any) -> Grade:
    return ThinkAnswerVerifier(**options).grade(Answer(text=text, prompt="?"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (GOOD, None),
        (f" \n{GOOD}\n ", None),
        ("<think></think><answer></answer>", None),
        ("<think>a < b and <b>c</b> and </i></think><answer>x > y</answer>", None),
        ("<think>a\nb</think>\n\n\n<answer>c\nd</answer>", None),
        ("", "no <think>"),
        ("4", "no <think>"),
        ("<answer>4</answer>", "no <think>"),
        ("two and two</think><answer>4</answer>", "no <think>"),
        ("<think>a<answer>4</answer>", "no </think>"),
        ("<think>a</think> 4", "no <answer>"),
        ("<think>a</think><answer>4", "no </answer>"),
        ("<think>a</think><answer>4</answer><answer>5</answer>", "tags repeated or out of order"),
        (f"{GOOD}{GOOD}", "tags repeated or out of order"),
        ("<answer>4</answer><think>a</think>", "tags repeated or out of order"),
        ("<think><answer>4</answer></think>", "tags repeated or out of order"),
        (f"Well. {GOOD}", "text outside of think and answer"),
        (f"{GOOD} Done.", "text outside of think and answer"),
        ("<think>a</think>so<answer>4</answer>", "text outside of think and answer"),
        ("<THINK>a</THINK><ANSWER>4</ANSWER>", "no <think>"),
        ("< think>a</think><answer>4</answer>", "no <think>"),
    ],
)
def test_what_is_well_formed(text: str, problem: str | None) -> None:
    assert form_problem(text) == problem


def test_a_prompt_that_opened_the_thought_leaves_the_rest_to_the_response() -> None:
    rest = GOOD.removeprefix("<think>")
    assert form_problem(rest, think_in_prompt=True) is None
    assert form_problem(GOOD, think_in_prompt=True) == "tags repeated or out of order"
    assert grade(rest, think_in_prompt=True).score == 1


@pytest.mark.parametrize("min_score", [0.0, -1.0])
def test_alone_the_form_is_worth_one_and_anything_else_zero_or_minus_one(min_score: float) -> None:
    good, bad = grade(GOOD, min_score=min_score), grade("4", min_score=min_score)
    assert (good.score, good.state, good.components) == (1.0, ScoreState.SCORED, {"well_formed": 1.0})
    assert (bad.score, bad.state, bad.reason) == (min_score, ScoreState.MODEL_FAULT, "no <think>")


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think><answer>42</answer>", 1.0),
        ("it is 42", 1.0),
        ("<think>42</think><answer>41</answer>", 1.0),  # the verifier reads it all
        ("<think>a</think><answer>41</answer>", -0.8),
        ("it is 41", -1.0),
    ],
)
def test_with_a_verifier_the_table_is_that_of_areal(text: str, score: float) -> None:
    assert grade(text, **AREAL).score == pytest.approx(score, abs=1e-12)


def test_the_form_of_a_right_answer_neither_costs_nor_earns_anything() -> None:
    found = grade("it is 42", **AREAL)
    assert (found.score, found.state, found.reason) == (1.0, ScoreState.SCORED, None)
    assert found.components == {"well_formed": 0.0, "correct": 1.0}


def test_without_minus_one_the_credit_counts_from_zero() -> None:
    assert grade("<think>a</think><answer>41</answer>", verifier=FORTY_TWO).score == 0.2
    assert grade("41", verifier=FORTY_TWO).score == 0


class HalfRight(Verifier):
    """A verifier with a partial score, which wants rows with a reference."""

    closed = False

    def grade(self, answer: Answer) -> Grade:
        if answer.text == "lost":
            return Grade(score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason="gone")
        return Grade(score=0.5, state=ScoreState.MODEL_FAULT, reason="half", components={"passed": 0.5})

    def check_row(self, reference: str | None, metadata: Mapping[str, Any]) -> None:
        if reference is None:
            raise DataError("no reference")

    def close(self) -> None:
        HalfRight.closed = True


HALF = {"verifier": f"{__name__}:HalfRight", "options": {}}


def test_half_right_is_wrong_and_both_reasons_are_told() -> None:
    good, bad = grade(GOOD, verifier=HALF), grade("4", verifier=HALF)
    assert (good.score, good.reason) == (0.2, "half")
    assert (bad.score, bad.reason) == (0.0, "no <think>; half")
    assert good.components == {"well_formed": 1.0, "correct": 0.0, "verifier.passed": 0.5}


def test_a_verifier_that_cannot_tell_leaves_no_score() -> None:
    found = grade("lost", verifier=HALF)
    assert found.state is ScoreState.INFRASTRUCTURE_FAULT
    assert math.isnan(found.score)


def test_rows_are_checked_and_what_was_started_is_ended_by_the_verifier() -> None:
    verifier = ThinkAnswerVerifier(verifier=HALF)
    with pytest.raises(DataError, match="no reference"):
        verifier.check_row(None, {})
    verifier.close()
    assert HalfRight.closed
    ThinkAnswerVerifier().check_row(None, {})


def test_the_section_names_the_verifier_of_its_verifier() -> None:
    right = {"kind": "pattern", "pattern": "42"}
    config = ThinkAnswerRewardConfig(kind="think_answer", verifier=right, min_score=-1.0)  # ty: ignore
    found = ThinkAnswerVerifier(**config.verifier_options()).grade(Answer(text="41", prompt="?"))
    assert found.score == -1


@pytest.mark.parametrize(
    ("right", "refused"),
    [
        ({"kind": "maths"}, False),
        ({"kind": "maths", "scores": {"correct": 0.5}}, True),
        ({"kind": "maths", "scores": {"correct": 2.0, "incorrect": 1.0}}, True),
        ({"kind": "countdown", "scores": {"correct": 0.9, "incorrect": 0.1}}, True),
        ({"kind": "countdown", "scores": {"incorrect": 0.1}}, False),
        (
            {"kind": "code", "form": "asserts", "cpu_seconds": 0.1, "idle_seconds": 0.1, "scores": {"correct": 0.5}},
            True,
        ),
        ({"kind": "pattern", "pattern": "42", "match_score": 0.5}, True),
        ({"kind": "pattern", "pattern": "42", "match_score": 0.0, "no_match_score": 1.0}, False),
        ({"kind": "pattern", "pattern": "42", "no_match_score": 1.0}, True),
    ],
)
def test_a_verifier_that_could_not_be_right_or_not_be_wrong_is_refused(right: dict[str, Any], refused: bool) -> None:
    refusal = pytest.raises(ConfigError, match="takes a score of 1 or more as correct")
    with refusal if refused else contextlib.nullcontext():
        ThinkAnswerRewardConfig(kind="think_answer", verifier=right)  # ty: ignore
