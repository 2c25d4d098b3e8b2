"""Limits decide whoever is quicker; a program that sleeps is ended once, and keeps nobody waiting."""

from dataclasses import replace

import pytest
from grade_cases import INC, RIGHT

from graded_programs import graded
from proximo_verifiers.code.verifier import CodeVerifier
from proximo_verifiers.sandbox.jobs import Ending, Limits, Outcome
from proximo_verifiers.sandbox.runner import Sandbox
from proximo_verifiers.verifier import Answer, PostponedError, ScoreState

RUN = {"test_setup_code": "len('')"}
"""What says nothing, but has the tests run."""
FORMS = {
    "compared": ({}, INC, RIGHT),
    "run": ({}, INC | RUN, RIGHT),
    "called": ({"form": "input_output"},
               {"input_output": {"fn_name": "inc", "inputs": [[1], [5]], "outputs": [2, 6]}}, RIGHT),
    "stdio": ({"form": "stdio"}, {"inputs": ["1", "5"], "outputs": ["2", "6"]}, "print(int(input()) + 1)"),
}  # fmt: skip
FLOODS = {
    "before": "print('x' * (2**20 + 9), flush=True)\n{}",
    "errors": "import sys\nsys.stderr.write('x' * (2**20 + 9))\n{}",
    "in two tests": "import sys\nprint('x' * (2**19 + 9), file=sys.stderr)\n{}\nold = inc\n"
    "def inc(x):\n    print('x' * (2**19 + 9), flush=True)\n    print('x' * 2**19, flush=True)\n    return old(x)",
}
SLEEPER = "import time\ndef inc(x): time.sleep(60)"


@pytest.mark.parametrize("quick", [True, False], ids=["killed at once", "killed too late"])
@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("form", FORMS)
def test_more_output_than_the_limit_is_wrong_whether_or_not_all_results_were_in(
    sandbox, monkeypatch, form, flood, quick
) -> None:
    options, row, right = FORMS[form]
    if form == "stdio" and flood == "in two tests":
        pytest.skip("each test is a program of its own")
    if not quick:
        monkeypatch.setattr(Sandbox, "kill", lambda *_: None)
    found = graded(sandbox, FLOODS[flood].format(right), row, partial=True, **options)
    assert (found.score, found.state) == (0.0, ScoreState.MODEL_FAULT)
    assert found.components == {"tests_passed": 0.0, "ran": 0.0, "compiled": 1.0}
    assert (found.reason or "").startswith("output limit")


@pytest.mark.parametrize("form", FORMS)
def test_as_much_output_as_the_limit_is_right(sandbox, form) -> None:
    options, row, right = FORMS[form]
    quiet = "import sys\nsys.stderr.write('x' * 2**20)\n"
    assert graded(sandbox, quiet + right, row, **options).score == 1.0


class Ended:
    """A runner whose programs do what they should, and then have exceeded a limit."""

    def __init__(self, sandbox, ending: Ending, lost_seconds: float | None) -> None:
        self.sandbox, self.ending, self.lost_seconds = sandbox, ending, lost_seconds
        self.starts = 0

    def start(self, program, *, helps=None):
        self.starts += helps is None
        return Ended.Job(self, self.sandbox.start(program, helps=helps and helps.job), is_program=helps is None)

    class Job:
        def __init__(self, runner: "Ended", job, *, is_program: bool) -> None:
            self.runner, self.job, self.is_program = runner, job, is_program

        def kill(self) -> None:
            self.job.kill()

        def wait(self) -> Outcome:
            outcome = self.job.wait()
            ended = replace(outcome, ending=self.runner.ending, lost_seconds=self.runner.lost_seconds)
            return ended if self.is_program else outcome


@pytest.mark.parametrize("ending", [Ending.CPU, Ending.WALL, Ending.IDLE, Ending.MEMORY, Ending.SCRATCH])
@pytest.mark.parametrize("form", ["compared", "run", "called"])
def test_a_limit_decides_also_where_all_results_were_in(sandbox, form, ending) -> None:
    options, row, right = FORMS[form]
    found = graded(Ended(sandbox, ending, 0.0), right, row, partial=True, **options)
    num_tests = 2 if form == "called" else 3
    assert found.state is ScoreState.MODEL_FAULT
    assert found.components["tests_passed"] == pytest.approx((num_tests - 1) / num_tests)
    assert (found.reason or "").endswith(f" in test {num_tests} of {num_tests}")


@pytest.mark.parametrize(
    ("ending", "lost_seconds", "runs"),
    [(Ending.IDLE, 0.0, 1), (Ending.IDLE, None, 2), (Ending.WALL, 30.0, 2), (Ending.CPU, 30.0, 1)],
)
def test_a_program_is_run_again_only_where_the_machine_kept_it_waiting(sandbox, ending, lost_seconds, runs) -> None:
    runner = Ended(sandbox, ending, lost_seconds)
    graded(runner, RIGHT, INC)
    assert runner.starts == runs


def test_a_limit_that_was_exceeded_is_the_ending_whoever_was_quicker() -> None:
    limits = Limits(cpu_seconds=1.0, wall_seconds=3.0, idle_seconds=2.0)
    used = {"cpu_seconds": 0.9, "wall_seconds": 2.9, "idle_seconds": 1.9}
    assert limits.exceeded(**used) is None
    assert limits.exceeded(**used | {"cpu_seconds": 1.0}) is Ending.CPU
    assert limits.exceeded(**used | {"wall_seconds": 3.0}) is Ending.WALL
    assert limits.exceeded(**used | {"idle_seconds": 2.0}) is Ending.IDLE
    assert replace(limits, idle_seconds=None).exceeded(**used | {"idle_seconds": 2.0}) is None


@pytest.mark.parametrize("row", [INC, INC | RUN], ids=["compared", "run"])
def test_a_program_that_sleeps_is_at_fault_when_its_idle_time_is_over(sandbox, row) -> None:
    found = graded(sandbox, SLEEPER, row, idle_seconds=0.2)
    assert found.state is ScoreState.MODEL_FAULT
    assert found.reason == "idle limit of 0.2 s in test 1 of 3"
    assert found.by_clock, "another machine may say otherwise"


def test_a_program_is_not_idle_while_its_tests_work(sandbox) -> None:
    test = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\nassert inc(1) == 2"
    assert graded(sandbox, RIGHT, {"test_list": [test]}, idle_seconds=0.3).score == 1.0


def test_a_program_that_sleeps_gives_up_its_first_turn_and_is_graded_in_its_second(sandbox) -> None:
    verifier = CodeVerifier(runner=sandbox, form="asserts", program="response", idle_seconds=20.0)
    short = "import time\ndef inc(x):\n    time.sleep(0.3)\n    return x + 1"
    answer = Answer(text=short, prompt="", metadata=INC, first_turn=True)
    with pytest.raises(PostponedError):
        verifier.grade(answer)
    assert verifier.grade(replace(answer, first_turn=False)).score == 1.0
    assert verifier.grade(replace(answer, text=RIGHT)).score == 1.0
