"""The code verifier on real problems: every reference program passes, and what plain Python fails does not."""

from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice

import pytest
from code_mutants import mutants
from code_problems import Problem, human_eval, mbpp, sanitized_mbpp

from graded_programs import open_sandbox

SETS = {"human_eval": human_eval, "mbpp": mbpp, "sanitized_mbpp": sanitized_mbpp}
by_set = pytest.mark.parametrize("name", SETS)
MUTANT_CPU_SECONDS = 0.5
HELPED = {"HumanEval/32", "HumanEval/38", "HumanEval/50"}
"""Their prompts define a function that the tests call, too. A mutant of it changes the tests that plain Python runs;
the verifier takes the prompt's own."""


def failing(sandbox, problems: list[Problem]) -> list[str]:
    found = [(problem.name, problem.grade(sandbox, problem.program)) for problem in problems]
    return [f"{name}: {grade.reason}" for name, grade in found if grade.score != 1.0]


@by_set
def test_reference_programs_pass(sandbox, name) -> None:
    assert failing(sandbox, SETS[name]()[::20]) == []


@pytest.mark.soak
@by_set
def test_every_reference_program_passes(sandbox, name) -> None:
    assert failing(sandbox, SETS[name]()) == []


ODD = {"mbpp/126", "mbpp/596", "mbpp/601", "mbpp/737", "mbpp/787", "mbpp/927", "HumanEval/32", "HumanEval/38"}
"""A function named like one of Python's, modules that only the program imports, objects as arguments, matches that are
true, a set-up that calls the program, tests that call another function of the prompt."""


def test_reference_programs_that_ask_for_something_special_pass(sandbox) -> None:
    problems = [problem for load in SETS.values() for problem in load() if problem.name in ODD]
    assert {problem.name for problem in problems} >= ODD - {"HumanEval/38"}
    assert failing(sandbox, problems) == []


def disagreements(sandbox, problem: Problem, programs: list[str]) -> tuple[list[str], int]:
    """Programs of which verifier and plain Python think differently, and the number of those that both let pass."""
    different, num_passed = [], 0
    for program in programs:
        graded = problem.grade(sandbox, program, MUTANT_CPU_SECONDS).score == 1.0
        plain = problem.passes_plainly(sandbox, program, MUTANT_CPU_SECONDS)
        num_passed += graded and plain
        if graded != plain and problem.name not in HELPED:
            different.append(f"{problem.name}: graded {graded}, plain {plain}\n{program}")
    return different, num_passed


@by_set
def test_a_mutant_fails_unless_plain_python_lets_it_pass(sandbox, name) -> None:
    problems = SETS[name]()[3::30]
    found = [disagreements(sandbox, problem, list(islice(mutants(problem.program), 1, 8, 3))) for problem in problems]
    assert list(chain.from_iterable(different for different, _ in found)) == []


@pytest.mark.soak
@by_set
def test_every_mutant_fails_unless_plain_python_lets_it_pass(sandbox, name) -> None:
    """All mutants of HumanEval, and of every third problem of MBPP."""
    problems = SETS[name]() if name == "human_eval" else SETS[name]()[::3]
    listed = [(problem, list(mutants(problem.program))) for problem in problems if problem.name not in ("mbpp/123",)]
    found = [disagreements(sandbox, problem, programs) for problem, programs in listed]
    total, passed = sum(len(programs) for _, programs in listed), sum(num_passed for _, num_passed in found)
    print(f"{name}: {total} mutants, {passed} behave under the tests")
    assert list(chain.from_iterable(different for different, _ in found)) == []
    assert passed < total / 3


@pytest.mark.soak
def test_eight_at_once_say_what_one_alone_says() -> None:
    problems = [problem for load in SETS.values() for problem in load()[::40] if problem.name != "mbpp/123"]
    programs = [
        (problem, each) for problem in problems for each in (problem.program, next(mutants(problem.program), ""))
    ]

    def grades(part: int, of: int) -> list[object]:
        with open_sandbox() as sandbox:
            return [problem.grade(sandbox, program) for problem, program in programs[part::of]]

    alone = grades(0, 1)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda _: grades(0, 1), range(8)))
    for each in together:
        assert each == alone
