"""Reward functions for other trainers, called as TRL and verl call them."""

from collections.abc import Iterator
from typing import Any

import pytest

from proximo_verifiers import CodeVerifier, DataError, Grader, MathsVerifier, SandboxError, trl_reward, verl_score


@pytest.fixture(scope="module")
def maths() -> Iterator[Grader]:
    with Grader(MathsVerifier, {"symbolic": "never"}, num_workers=1) as grader:
        yield grader


@pytest.fixture(scope="module")
def told() -> Iterator[Grader]:
    """Its reasons say what the verifier was handed, and its score is -1."""
    with Grader("example_verifiers:Everything", num_workers=1) as grader:
        yield grader


class Values:
    """As numpy's arrays and numbers."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tolist(self) -> Any:
        return self.value


def handed(grader: Grader, reward: Any, monkeypatch: pytest.MonkeyPatch, **call: Any) -> Any:
    """The answers that a reward function gives to the grader."""
    answers: list[Any] = []
    grade = grader.grade

    def noting(given: Any, *, names: Any = ()) -> Any:
        answers.extend(given)
        return grade(given, names=names)

    monkeypatch.setattr(grader, "grade", noting)
    reward(**call)
    return answers


def test_texts_and_conversations_are_scored_in_their_order(maths: Grader) -> None:
    reward = trl_reward(maths)
    assert reward.__name__ == "MathsVerifier", "TRL logs it under this name"
    question = [{"role": "user", "content": "6 * 7?"}]
    rewards = reward(
        prompts=["6 * 7?", question, question, question],
        completions=[
            "\\boxed{42}",
            [{"role": "assistant", "content": "\\boxed{43}"}],
            [{"role": "assistant", "content": "a tool"}, {"role": "assistant", "content": "so \\boxed{42}"}],
            [{"role": "assistant", "content": [{"type": "text", "text": "\\boxed{42}"}]}],
        ],
        completion_ids=[[1], [2], [3], [4]],
        answer=["42", "42", 42, 42.0],
        trainer_state=object(),
        log_metric=print,
    )
    assert rewards == [1.0, 0.0, 1.0, 1.0]
    assert reward(prompts=[], completions=[], answer=[]) == []


def test_a_verifier_gets_the_other_columns_or_those_that_are_named(
    told: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    call: dict[str, Any] = {
        "prompts": ["p", [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}]],
        "completions": ["a", "b"],
        "completion_ids": [[1], [2]],
        "answer": ["x", None],
        "level": [Values(1), Values(2)],
        "tests": [["t"], ["u"]],
        "trainer_state": object(),
    }
    all_of_them = handed(told, trl_reward(told), monkeypatch, **call)
    assert [dict(each.metadata) for each in all_of_them] == [{"level": 1, "tests": ["t"]}, {"level": 2, "tests": ["u"]}]
    assert [each.reference for each in all_of_them] == ["x", None]
    assert [each.prompt for each in all_of_them] == ["p", [{"role": "user", "content": "what is it?"}]]
    some = handed(told, trl_reward(told, reference=None, columns=["tests"]), monkeypatch, **call)
    assert [dict(each.metadata) for each in some] == [{"tests": ["t"]}, {"tests": ["u"]}]
    assert [each.reference for each in some] == [None, None]


def test_an_answer_without_a_score_is_none_for_trl_and_a_number_for_verl() -> None:
    with Grader("example_verifiers:OfNoUse", num_workers=1, attempts=1) as grader:
        assert trl_reward(grader)(prompts=["p"], completions=["c"]) == [None]
        assert verl_score(grader)("d", "c", None) == 0.0
        assert verl_score(grader, without_grade=-1.0)("d", "c", None) == -1.0


def test_a_row_that_cannot_be_graded_is_an_error_that_names_it(maths: Grader) -> None:
    reward = trl_reward(maths)
    with pytest.raises(DataError, match=r"^row 1 of the batch: .*'MathsVerifier': a maths reward needs a reference"):
        reward(prompts=["p", "q"], completions=["\\boxed{1}", "\\boxed{1}"], answer=["1", None])
    with pytest.raises(DataError, match="needs a reference answer"):
        verl_score(maths)("gsm8k", "\\boxed{1}", None)
    with pytest.raises(DataError, match=r"column 'answer' must be a text or a number, got \['1'\]"):
        reward(prompts=["p"], completions=["\\boxed{1}"], answer=[["1"]])
    with pytest.raises(DataError, match=r"^row 0 of the batch: .* as JSON, and one of them cannot be converted"):
        reward(prompts=["p"], completions=["\\boxed{1}"], answer=["1"], image=[object()])
    assert trl_reward(maths, columns=())(prompts=["p"], completions=["\\boxed{1}"], answer=["1"], image=[object()]) == [
        1.0
    ]


def test_verl_scores_one_answer_with_what_it_knows_of_it(told: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"data_source": "d", "solution_str": "s", "ground_truth": 4, "extra_info": {"index": Values(3)}}
    (answer,) = handed(told, verl_score(told), monkeypatch, **call)
    assert (answer.text, answer.reference) == ("s", "4")
    assert answer.metadata == {"index": 3, "data_source": "d"}
    (answer,) = handed(told, verl_score(told, reference=None), monkeypatch, **call, other="ignored")
    assert answer.metadata == {"index": 3, "data_source": "d", "ground_truth": 4}


def test_verl_scores_programs_by_the_tests_in_its_ground_truth() -> None:
    options = {"form": "input_output", "tests_columns": ["ground_truth"]}
    tests = '{"inputs": ["2\\n", "3\\n"], "outputs": ["4\\n", "6\\n"]}'
    try:
        grader = Grader(CodeVerifier, options, num_workers=1)
    except SandboxError as error:
        pytest.skip(f"no sandbox here: {error}")
    with grader:
        score = verl_score(grader, reference=None)
        assert score("apps", "```python\nprint(2 * int(input()))\n```", tests) == 1.0
        assert score("apps", "```python\nprint(4)\n```", tests) == 0.0
