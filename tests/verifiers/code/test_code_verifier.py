"""The verifier of programs apart from its grades: what it refuses, and the time that it gives to programs."""

from dataclasses import replace

import pytest

from graded_programs import graded
from proximo_verifiers.code.verifier import CodeVerifier
from proximo_verifiers.errors import ConfigError, DataError
from proximo_verifiers.verifier import ScoreState


def test_a_guarantee_that_nobody_knows_cannot_be_waived() -> None:
    with pytest.raises(ConfigError, match="no guarantee 'everything'"):
        CodeVerifier(form="asserts", sandbox_waived=["everything"])


def test_an_answer_that_took_too_long_has_the_score_of_a_wrong_one(sandbox) -> None:
    grade = CodeVerifier(runner=sandbox, form="asserts", incorrect_score=-2.0).timeout_grade()
    assert (grade.score, grade.state) == (-2.0, ScoreState.MODEL_FAULT)
    assert grade.components == {"tests_passed": 0.0, "ran": 0.0, "compiled": 0.0}


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
