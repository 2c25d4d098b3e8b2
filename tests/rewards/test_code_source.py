"""Programs as a source of scores: the section of a recipe, its workers, and what is refused before they start."""

import pytest

from graded_programs import open_sandbox
from proximo.config.rewards import verifiers as section_of_code
from proximo.config.rewards.verifiers import WORKER_MEMORY_MIB, AnswerScores, CodeRewardConfig, ThinkAnswerRewardConfig
from proximo.rewards.verifier_reward import VerifierReward
from proximo_verifiers.code.verifier import LEAST_WALL_PER_CPU, RUN_FRACTION, CodeOptions
from proximo_verifiers.verifier import ScoreState
from records_made import prompt, response

ROW = {"test_list": ["assert inc(1) == 2", "assert inc(2) == 3"]}
ANSWERS = {
    "right": "So:\n```python\ndef inc(x):\n    return x + 1\n```\n",
    "wrong": "```python\ndef inc(x):\n    return 2\n```",
    "none": "I cannot.",
    "broken": "```python\ndef inc(x:\n```",
}


def test_a_source_of_a_recipe_scores_programs_in_workers() -> None:
    open_sandbox().close()
    config = CodeRewardConfig(
        kind="code", name="tests", form="asserts", partial=True, scores=AnswerScores(no_answer=-1.0), workers=1
    )
    options = config.verifier_options()
    source = VerifierReward(
        config.verifier_path(), name=config.name, options=options, answer_seconds=config.answer_seconds
    )
    try:
        asked = prompt(metadata=ROW)
        found = source.score([response(to=asked, text=text) for text in ANSWERS.values()])
        assert source.name == "tests"
    finally:
        source.close()
    assert [scored.score for scored in found] == [1.0, 0.5, -1.0, 0.0]
    assert [scored.components["tests_passed"] for scored in found] == [1.0, 0.5, 0.0, 0.0]
    assert [scored.components["compiled"] for scored in found] == [1.0, 1.0, 0.0, 0.0]
    scored, fault = ScoreState.SCORED, ScoreState.MODEL_FAULT
    assert [each.state for each in found] == [scored, scored, fault, fault]


def test_the_defaults_of_verifier_and_section_are_the_same() -> None:
    section = CodeRewardConfig(kind="code", form="check").verifier_options()
    assert set(section) == set(CodeOptions.__dataclass_fields__) - {"tests_columns"}  # which other trainers need
    for name, value in section.items():
        if name != "form":
            default = CodeOptions.__dataclass_fields__[name].default
            assert value == (list(default) if isinstance(default, tuple) else default), name


def test_two_runs_fit_into_the_time_of_an_answer() -> None:
    assert section_of_code.LEAST_WALL_PER_CPU == LEAST_WALL_PER_CPU
    config = CodeRewardConfig(kind="code", form="asserts")
    assert config.answer_seconds > 2 * (LEAST_WALL_PER_CPU * config.cpu_seconds + config.idle_seconds)
    assert 2 * RUN_FRACTION < 1
    for longer in ({"cpu_seconds": 28.0}, {"idle_seconds": 52.0}):
        with pytest.raises(ValueError, match=r"answer_seconds \(120\) must be above 1\d\d"):
            CodeRewardConfig(kind="code", form="asserts", **longer)


def test_a_worker_has_the_memory_that_its_programs_may_take() -> None:
    assert CodeRewardConfig(kind="code", form="asserts").memory_of_a_worker_mib == WORKER_MEMORY_MIB
    assert CodeRewardConfig(kind="code", form="asserts", memory_mib=8192).memory_of_a_worker_mib == 8192


def test_a_verifier_has_the_time_of_the_form_around_it() -> None:
    config = ThinkAnswerRewardConfig(
        kind="think_answer", answer_seconds=500.0, verifier={"kind": "code", "form": "asserts"}
    )
    assert config.verifier_options()["verifier"]["options"]["answer_seconds"] == 500.0
