"""What each judge says of an answer that it was killed over: no part is missing, and nothing else is worth less."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from proximo.enums import ScoreState
from proximo.rewards.maths.countdown import CountdownJudge
from proximo.rewards.maths.judge import MathsJudge
from proximo.rewards.texts.json_schema import JSONSchemaJudge
from proximo.rewards.texts.length import LengthJudge
from proximo.rewards.texts.pattern import PatternJudge
from proximo.rewards.texts.repetition import RepetitionJudge
from proximo.rewards.texts.think_answer import ThinkAnswerJudge
from proximo.rewards.verdicts import Answer
from proximo.rewards.verifier_reward import JudgedReward
from proximo.rewards.workers.main import judge_service
from records_made import response

COUNTDOWN = {
    "answer_from": ["tags", "last_line"],
    "numbers_column": "nums",
    "target_column": "target",
    "each_number": "exactly_once",
    "operators": ["+", "-"],
    "right": 1.0,
    "wrong": -1.0,
    "no_answer": -0.5,
}
MATHS = {
    "answer_from": ["boxed"],
    "answers_column": None,
    "several_boxes": "last",
    "pattern": None,
    "relative_tolerance": None,
    "symbolic": "never",
    "symbolic_cpu_seconds": 1.0,
    "right": 1.0,
    "wrong": -1.0,
    "no_answer": -1.0,
}
VERIFIER = {"judge": "proximo.rewards.texts.pattern:PatternJudge", "options": {"pattern": "42"}}
JUDGES = [
    CountdownJudge(**COUNTDOWN),
    MathsJudge(**MATHS),
    JSONSchemaJudge(satisfies={"type": "object"}),
    LengthJudge(longest=3),
    PatternJudge(pattern="a"),
    PatternJudge(pattern="a", match_score=-0.5, max_matches=3),
    RepetitionJudge(ngram=1, longest_run=2),
    ThinkAnswerJudge(),
    ThinkAnswerJudge(right=VERIFIER, zero_as_minus_one=True),
]
TEXTS = ["", "a", "a a a a a a", "1 + 2", "1 + 1", "\\boxed{3}", "\\boxed{4}", "{}", "<answer>42</answer>", "x" * 9]


@pytest.mark.parametrize("judge", JUDGES, ids=lambda judge: type(judge).__name__)
def test_a_time_out_names_every_part_and_beats_no_answer(judge: Any) -> None:
    given = judge.timeout_verdict()
    facts = {"nums": [1, 2], "target": 3}
    judged = [judge.judge(Answer(text=text, prompt="", reference="3", metadata=facts)) for text in TEXTS]
    names = {name for verdict in judged for name in verdict.components}
    assert dict(given.components) == dict.fromkeys(names, 0.0)
    assert given.state is ScoreState.MODEL_FAULT
    assert given.score <= min(verdict.score for verdict in judged)


def test_a_search_that_was_given_up_is_not_worth_more_than_matches_that_cost_something() -> None:
    judge = PatternJudge(pattern=r"^(a|a)*(a|a)*(a|aa)+$", match_score=-0.5, match_seconds=0.1)
    found = judge.judge(Answer(text="a" * 64 + "!", prompt=""))
    assert found == dataclasses.replace(judge.timeout_verdict(), reason="the pattern took more than 0.1 s")
    assert found.score == -0.5


def test_a_verifier_without_a_verdict_for_time_outs_has_no_parts_in_it() -> None:
    judge = ThinkAnswerJudge(right={"judge": "judges_made:Letters", "options": {}})
    assert dict(judge.timeout_verdict().components) == {"well_formed": 0.0, "right": 0.0}


def test_the_clock_of_a_verifier_is_that_of_the_whole_verdict() -> None:
    judge = {"judge": "judges_made:Letters", "options": {"by_clock": True}}
    serve, about, _ = judge_service("proximo.rewards.texts.think_answer:ThinkAnswerJudge", {"right": judge})
    asked = {"text": "b", "prompt": "", "reference": None, "metadata": {}, "finish": "eos", "num_tokens": 1}
    assert serve({"judge": asked})["by_clock"] is True
    assert about["by_clock"] is False


def test_answers_that_make_their_judge_wait_come_after_all_others(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    source = JudgedReward("judges_made:Waiting", name="j", options={"seen": str(seen)}, answer_seconds=60.0)
    try:
        found = source.score([response(text=text) for text in ("z1", "a", "z2", "aa", "a1")])
    finally:
        source.close()
    assert [json.loads(line) for line in seen.read_text().splitlines()] == ["z1", "a", "z2", "aa", "a1", "z1", "z2"]
    assert {each.state for each in found} == {ScoreState.SCORED}


def test_an_answer_that_gave_up_its_turn_is_at_fault_where_there_is_no_time_for_another() -> None:
    source = JudgedReward("judges_made:Waiting", name="j", answer_seconds=600.0, step_seconds=3.0)
    try:
        found = source.score([response(text=text) for text in ("z" * 400, "z" * 401, "a")])
    finally:
        source.close()
    assert [each.state for each in found] == [ScoreState.MODEL_FAULT, ScoreState.MODEL_FAULT, ScoreState.SCORED]
    reason = "idle for longer than a first turn, and not asked again before step_seconds were over"
    assert {each.reason for each in found[:2]} == {reason}
