"""What each verifier says of an answer that it was killed over: no part is missing, and nothing else is worth less."""

from typing import Any

import pytest

from proximo.rewards.text_verifiers import PatternVerifier, ThinkAnswerVerifier
from proximo_verifiers.maths.countdown import CountdownVerifier
from proximo_verifiers.maths.verifier import MathsVerifier
from proximo_verifiers.verifier import Answer, ScoreState
from proximo_verifiers.workers.services import verifier_service

COUNTDOWN = {
    "answer_from": ["tags", "last_line"],
    "number_usage": "exactly_once",
    "operators": ["+", "-"],
    "correct_score": 1.0,
    "incorrect_score": -1.0,
    "no_answer_score": -0.5,
}
MATHS = {
    "answer_from": ["boxed"],
    "multiple_answers": "last",
    "pattern": None,
    "relative_tolerance": None,
    "symbolic": "never",
    "symbolic_cpu_seconds": 1.0,
    "correct_score": 1.0,
    "incorrect_score": -1.0,
    "no_answer_score": -1.0,
}
VERIFIER = {"verifier": "proximo.rewards.text_verifiers:PatternVerifier", "options": {"pattern": "42"}}
VERIFIERS = [
    CountdownVerifier(**COUNTDOWN),
    MathsVerifier(**MATHS),
    PatternVerifier(pattern="a"),
    PatternVerifier(pattern="a", match_score=-0.5),
    ThinkAnswerVerifier(),
    ThinkAnswerVerifier(verifier=VERIFIER, min_score=-1.0),
]
TEXTS = ["", "a", "a a a a a a", "1 + 2", "1 + 1", "\\boxed{3}", "\\boxed{4}", "{}", "<answer>42</answer>", "x" * 9]


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: type(verifier).__name__)
def test_a_time_out_names_every_part_and_beats_no_answer(verifier: Any) -> None:
    given = verifier.timeout_grade()
    facts = {"nums": [1, 2], "target": 3}
    graded = [verifier.grade(Answer(text=text, prompt="", reference="3", metadata=facts)) for text in TEXTS]
    names = {name for grade in graded for name in grade.components}
    assert dict(given.components) == dict.fromkeys(names, 0.0)
    assert given.state is ScoreState.MODEL_FAULT
    assert given.score <= min(grade.score for grade in graded)


def test_a_verifier_without_a_grade_for_time_outs_has_no_parts_in_it() -> None:
    verifier = ThinkAnswerVerifier(verifier={"verifier": "example_verifiers:Letters", "options": {}})
    assert dict(verifier.timeout_grade().components) == {"well_formed": 0.0, "correct": 0.0}


def test_the_clock_of_a_verifier_is_that_of_the_whole_grade() -> None:
    verifier = {"verifier": "example_verifiers:Letters", "options": {"by_clock": True}}
    serve, about, _ = verifier_service("proximo.rewards.text_verifiers:ThinkAnswerVerifier", {"verifier": verifier})
    asked = {"text": "b", "prompt": "", "reference": None, "metadata": {}, "finish": "eos", "num_tokens": 1}
    assert serve({"grade": asked})["by_clock"] is True
    assert about["by_clock"] is False


def test_a_verifier_that_does_not_apply_leaves_no_score() -> None:
    verifier = {"verifier": "example_verifiers:LettersAlone", "options": {}}
    serve, _, _ = verifier_service("proximo.rewards.text_verifiers:ThinkAnswerVerifier", {"verifier": verifier})
    asked = {"text": "b1", "prompt": "", "reference": None, "metadata": {}, "finish": "eos", "num_tokens": 1}
    assert serve({"grade": asked})["state"] == "not_applicable"
