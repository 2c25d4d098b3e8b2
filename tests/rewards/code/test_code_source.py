"""Programs as a source of scores: the section of a recipe, its workers, and what is refused before they start."""

from dataclasses import replace

import pytest
from graded_programs import graded, open_sandbox

from proximo.config.rewards.code import CodeRewardConfig
from proximo.config.rewards.texts import ThinkAnswerRewardConfig
from proximo.enums import ScoreState
from proximo.errors import ConfigError, DataError
from proximo.rewards.code.verifier import LEAST_WALL_PER_CPU, RUN_FRACTION, CodeOptions, CodeVerifier
from proximo.rewards.verifier_reward import VerifierReward
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
    config = CodeRewardConfig(kind="code", name="tests", form="asserts", partial=True, no_program_score=-1.0, workers=1)
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


def test_every_field_of_the_section_is_an_option_of_the_verifier() -> None:
    config = CodeRewardConfig(kind="code", form="asserts")
    options = CodeOptions(**config.verifier_options())
    assert {
        name: tuple(value) if isinstance(value, list) else value for name, value in config.verifier_options().items()
    } == {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in ((name, getattr(options, name)) for name in CodeOptions.__dataclass_fields__)
    }


def test_the_defaults_of_verifier_and_section_are_the_same() -> None:
    section = CodeRewardConfig(kind="code", form="check").verifier_options()
    for name, value in section.items():
        if name != "form":
            default = CodeOptions.__dataclass_fields__[name].default
            assert value == (list(default) if isinstance(default, tuple) else default), name


def test_two_runs_fit_into_the_time_of_an_answer() -> None:
    config = CodeRewardConfig(kind="code", form="asserts")
    assert config.answer_seconds > 2 * (LEAST_WALL_PER_CPU * config.cpu_seconds + config.idle_seconds)
    assert 2 * RUN_FRACTION < 1
    for longer in ({"cpu_seconds": 28.0}, {"idle_seconds": 52.0}):
        with pytest.raises(ValueError, match=r"answer_seconds \(120\) must be above 1\d\d"):
            CodeRewardConfig(kind="code", form="asserts", **longer)


def test_a_guarantee_that_nobody_knows_cannot_be_waived() -> None:
    with pytest.raises(ConfigError, match="no guarantee 'everything'"):
        CodeVerifier(form="asserts", sandbox_waived=["everything"])


def test_an_answer_that_took_too_long_has_the_score_of_a_wrong_one(sandbox) -> None:
    grade = CodeVerifier(runner=sandbox, form="asserts", incorrect_score=-2.0).timeout_grade()
    assert (grade.score, grade.state) == (-2.0, ScoreState.MODEL_FAULT)
    assert grade.components == {"tests_passed": 0.0, "ran": 0.0, "compiled": 0.0}


def test_a_program_cannot_have_more_memory_than_its_worker() -> None:
    with pytest.raises(ValueError, match=r"memory_mib \(8192\) must be at most worker_memory_mib \(4096\)"):
        CodeRewardConfig(kind="code", form="asserts", memory_mib=8192)
    CodeRewardConfig(kind="code", form="asserts", memory_mib=8192, worker_memory_mib=None)
    CodeRewardConfig(kind="code", form="asserts", memory_mib=8192, worker_memory_mib=8192)


MANY = {
    "asserts": {"test_list": ["assert inc(1) == 2"] * 30},
    "stdio": {"inputs": [""] * 30, "outputs": [""] * 30},
    "input_output": {"input_output": {"fn_name": "f", "inputs": [[1]] * 30, "outputs": [1] * 30}},
}


@pytest.mark.parametrize("form", MANY)
def test_the_tests_of_a_row_have_to_fit_into_the_time_of_an_answer(sandbox, form) -> None:
    options = {"form": form, "cpu_seconds": 0.5, "limit_per_test": True}
    CodeVerifier(runner=sandbox, answer_seconds=70.5, **options).check_row(None, MANY[form])
    CodeVerifier(runner=sandbox, answer_seconds=13.0, **{**options, "limit_per_test": False}).check_row(
        None, MANY[form]
    )
    with pytest.raises(DataError, match=r"30 tests of cpu_seconds \(0.5\) each, .* must be above 70"):
        CodeVerifier(runner=sandbox, answer_seconds=70.0, **options).check_row(None, MANY[form])


def test_a_verifier_has_the_time_of_the_form_around_it() -> None:
    config = ThinkAnswerRewardConfig(
        kind="think_answer", answer_seconds=500.0, verifier={"kind": "code", "form": "asserts"}
    )
    assert config.verifier_options()["verifier"]["options"]["answer_seconds"] == 500.0


class Asked:
    """A runner that notes the limits of what it starts, and says how long that ran and was idle."""

    def __init__(self, sandbox) -> None:
        self.sandbox, self.limits = sandbox, []

    def start(self, program, *, helps=None):
        self.limits.append(program.limits)
        self.job = self.sandbox.start(program, helps=helps)
        return self

    def wait(self):
        return replace(self.job.wait(), wall_seconds=0.75, idle_seconds=0.5)


def test_all_inputs_share_one_limit_of_wall_clock_time_within_that_of_the_answer(sandbox) -> None:
    row = {"inputs": [""] * 4, "outputs": ["1"] * 4}
    runner = Asked(sandbox)
    graded(runner, "print(1)", row, form="stdio", idle_seconds=3.0)
    assert [limits.idle_seconds for limits in runner.limits] == [3.0, 2.5, 2.0, 1.5]

    runner = Asked(sandbox)
    graded(runner, "print(1)", row, form="stdio", cpu_seconds=1.0, limit_per_test=True, answer_seconds=20.0)
    assert [limits.cpu_seconds for limits in runner.limits] == [1.0] * 4
    assert [limits.wall_seconds for limits in runner.limits] == [9.0, 8.25, 7.5, 6.75]
