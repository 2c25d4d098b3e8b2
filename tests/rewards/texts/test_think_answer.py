"""The form of think and answer: what is well-formed, AReaL's table, and what a verifier within it is shown."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import pytest

from proximo.config.rewards.texts import ThinkAnswerRewardConfig
from proximo.enums import ScoreState
from proximo.errors import ConfigError, DataError
from proximo.rewards.texts.think_answer import ThinkAnswerJudge, read_form
from proximo.rewards.verdicts import Answer, Judge, Verdict

GOOD = "<think>two and two</think>\n<answer>4</answer>"
FORTY_TWO = {"judge": "proximo.rewards.texts.pattern:PatternJudge", "options": {"pattern": "42"}}
AREAL = {"right": FORTY_TWO, "zero_as_minus_one": True}


def verdict(text: str, **options: Any) -> Verdict:
    return ThinkAnswerJudge(**options).judge(Answer(text=text, prompt="?"))


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
    assert read_form(text)[0] == problem


def test_a_prompt_that_opened_the_thought_leaves_the_rest_to_the_response() -> None:
    rest = GOOD.removeprefix("<think>")
    assert read_form(rest, opened_by_prompt=True) == (None, "4")
    assert read_form(GOOD, opened_by_prompt=True)[0] == "tags repeated or out of order"
    assert verdict(rest, opened_by_prompt=True).score == 1


@pytest.mark.parametrize(("minus_one", "floor"), [(False, 0.0), (True, -1.0)])
def test_alone_the_form_is_worth_one_and_anything_else_zero_or_minus_one(minus_one: bool, floor: float) -> None:
    good, bad = verdict(GOOD, zero_as_minus_one=minus_one), verdict("4", zero_as_minus_one=minus_one)
    assert (good.score, good.state, good.components) == (1.0, ScoreState.SCORED, {"well_formed": 1.0})
    assert (bad.score, bad.state, bad.reason) == (floor, ScoreState.MODEL_FAULT, "no <think>")


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
    assert verdict(text, **AREAL).score == pytest.approx(score, abs=1e-12)


def test_the_form_of_a_right_answer_neither_costs_nor_earns_anything() -> None:
    found = verdict("it is 42", **AREAL)
    assert (found.score, found.state, found.reason) == (1.0, ScoreState.SCORED, None)
    assert found.components == {"well_formed": 0.0, "right": 1.0, "right.matches": 1.0}


def test_without_minus_one_the_credit_counts_from_zero() -> None:
    assert verdict("<think>a</think><answer>41</answer>", right=FORTY_TWO).score == 0.2
    assert verdict("<think>a</think><answer>41</answer>", right=FORTY_TWO, well_formed_credit=0.5).score == 0.5
    assert verdict("41", right=FORTY_TWO, well_formed_credit=0.5).score == 0


def test_a_verifier_of_the_answer_part_does_not_see_the_thought() -> None:
    thought = "<think>42</think><answer>41</answer>"
    assert verdict(thought, **AREAL, right_reads="answer").components["right"] == 0
    assert verdict("<think>41</think><answer> 42 </answer>", **AREAL, right_reads="answer").score == 1
    assert verdict("malformed 42", **AREAL, right_reads="answer").score == 1


class HalfRight(Judge):
    """A judge with a partial score, which wants rows with a reference."""

    closed = False

    def judge(self, answer: Answer) -> Verdict:
        if answer.text == "lost":
            return Verdict(score=math.nan, state=ScoreState.INFRASTRUCTURE_FAULT, reason="gone")
        return Verdict(score=0.5, state=ScoreState.MODEL_FAULT, reason="half", components={"passed": 0.5})

    def check_row(self, reference: str | None, metadata: Mapping[str, Any]) -> None:
        if reference is None:
            raise DataError("no reference")

    def close(self) -> None:
        HalfRight.closed = True


HALF = {"judge": f"{__name__}:HalfRight", "options": {}}


def test_half_right_is_wrong_and_both_reasons_are_told() -> None:
    good, bad = verdict(GOOD, right=HALF), verdict("4", right=HALF)
    assert (good.score, good.reason) == (0.2, "half")
    assert (bad.score, bad.reason) == (0.0, "no <think>; half")
    assert good.components == {"well_formed": 1.0, "right": 0.0, "right.passed": 0.5}


def test_a_verifier_that_cannot_tell_leaves_no_score() -> None:
    found = verdict("lost", right=HALF)
    assert found.state is ScoreState.INFRASTRUCTURE_FAULT
    assert math.isnan(found.score)


def test_rows_are_checked_and_what_was_started_is_ended_by_the_verifier() -> None:
    judge = ThinkAnswerJudge(right=HALF)
    with pytest.raises(DataError, match="no reference"):
        judge.check_row(None, {})
    judge.close()
    assert HalfRight.closed
    ThinkAnswerJudge().check_row(None, {})


def test_the_section_names_the_judge_of_its_verifier() -> None:
    right = {"kind": "pattern", "pattern": "42"}
    config = ThinkAnswerRewardConfig(kind="think_answer", right=right, zero_as_minus_one=True)  # ty: ignore
    found = ThinkAnswerJudge(**config.judge_options()).judge(Answer(text="41", prompt="?"))
    assert found.score == -1


@pytest.mark.parametrize(
    ("right", "refused"),
    [
        ({"kind": "maths"}, False),
        ({"kind": "maths", "right": 0.5}, True),
        ({"kind": "maths", "right": 2.0, "wrong": 1.0}, True),
        ({"kind": "countdown", "right": 0.9, "wrong": 0.1}, True),
        ({"kind": "countdown", "wrong": 0.1}, False),
        ({"kind": "code", "form": "asserts", "cpu_seconds": 0.1, "idle_seconds": 0.1, "right": 0.5}, True),
        ({"kind": "json_schema", "satisfies": {"type": "object"}}, False),
        ({"kind": "pattern", "pattern": "42", "match_score": 0.5}, True),
        ({"kind": "pattern", "pattern": "42", "match_score": 0.5, "max_matches": 2}, False),
        ({"kind": "pattern", "pattern": "42", "match_score": 0.0, "no_match_score": 1.0}, False),
        ({"kind": "pattern", "pattern": "42", "no_match_score": 1.0}, True),
    ],
)
def test_a_verifier_that_could_not_be_right_or_not_be_wrong_is_refused(right: dict[str, Any], refused: bool) -> None:
    refusal = pytest.raises(ConfigError, match="right is what it scores 1 or more")
    with refusal if refused else contextlib.nullcontext():
        ThinkAnswerRewardConfig(kind="think_answer", right=right)  # ty: ignore
