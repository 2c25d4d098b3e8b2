"""The verifier of programs: runs the program of an answer against the tests of its row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from proximo_verifiers.code.calls import run_calls, run_comparisons
from proximo_verifiers.code.extraction import Which, program_of
from proximo_verifiers.code.problems import (
    ENTRY_POINT,
    STUB,
    TESTS_COLUMNS,
    Calls,
    Form,
    InputsOutputs,
    Problem,
    TestSuite,
    read_problem,
    text_before,
)
from proximo_verifiers.code.result import Fault, Findings, printable
from proximo_verifiers.code.stdio import run_inputs
from proximo_verifiers.code.test_runner import PRELOAD, rehearsed, run_suite
from proximo_verifiers.errors import ConfigError, DataError, check_choices
from proximo_verifiers.sandbox.jobs import MIB, Limits, Runner
from proximo_verifiers.sandbox.runner import Sandbox
from proximo_verifiers.verifier import Answer, Grade, PostponedError, ScoreState

MAX_PROGRAM_CHARACTERS = 100_000
LEAST_WALL_PER_CPU = 2.0
"""Wall-clock seconds allowed per CPU second, since a busy machine may keep a program waiting as long again."""
RUN_FRACTION = 0.45
"""Fraction of `answer_seconds` for one run, since a program that was kept waiting is run twice."""
FIRST_IDLE_SECONDS = 0.5
"""Idle time after which a program gives up its first turn, so that other answers need not wait for it."""
COMPONENTS = ("tests_passed", "ran", "compiled")


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeOptions:
    """The options of `CodeVerifier`."""

    form: Form
    """What tests a row has. `asserts`: statements that call a function (MBPP). `check`: a function `check(candidate)`
    (HumanEval). `stdio`: inputs and outputs in two columns. `input_output`: both in one column of JSON (APPS, TACO)."""
    answer_seconds: float = 120.0
    """Wall-clock limit of one answer, of which each of up to two runs gets 0.45."""
    tests_columns: Sequence[str] = ()
    """Columns with the tests; empty for those of the form (`TESTS_COLUMNS`). The other columns have fixed names."""
    program: Which = "last_block"
    """Which part of an answer is the program (`extraction.program_of`)."""
    allow_unfenced: bool = False
    """Take an answer without a fenced block as a program."""
    cpu_seconds: float = 4.0
    """CPU seconds of a program for all tests, or with `limit_per_test` for each."""
    idle_seconds: float = 5.0
    """Seconds in which a program may neither compute nor wait for a processor, for all tests."""
    limit_per_test: bool = False
    memory_mib: int = 512
    """Memory of a program in MiB, including the interpreter's."""
    float_tolerance: float | None = None
    """Largest absolute or relative difference of a number in an output or result; None demands equality."""
    partial: bool = False
    """The score grows with the share of tests that pass."""
    correct_score: float = 1.0
    incorrect_score: float = 0.0
    no_answer_score: float = 0.0
    packages: Sequence[str] = ()
    """Installed packages that programs may import, by import name."""
    sandbox_waived: Sequence[str] = ()
    """Guarantees of the sandbox to do without (`guarantees.NAMES`)."""


class CodeVerifier:
    """Runs the program of an answer against the tests of its row in a sandbox. Options: `CodeOptions`."""

    answer_seconds = 120.0
    """Limit of one answer where a grader is told none. A grader tells the verifier its limit."""

    def __init__(self, *, runner: Runner | None = None, **options: Any) -> None:
        """Raises SandboxError if the machine lacks a guarantee that is not waived, ConfigError for an unknown form,
        program or guarantee."""
        self._options = CodeOptions(**options)
        check_choices("form cannot be", [self._options.form], get_args(Form))
        check_choices("program cannot be", [self._options.program], get_args(Which))
        self._tests_columns = tuple(self._options.tests_columns) or TESTS_COLUMNS[self._options.form]
        self._runner = _open_sandbox(self._options) if runner is None else runner

    def grade(self, answer: Answer) -> Grade:
        """The grade, with the components `tests_passed`, `ran` and `compiled`.

        Raises DataError for a row that cannot be graded, SandboxError if no program can be run, PostponedError in the
        first turn of an answer whose program is idle.
        """
        prompt = _prompt(answer.metadata, answer.prompt)
        problem = read_problem(self._options.form, self._tests_columns, answer.metadata, prompt)
        program = program_of(
            answer.text,
            self._options.program,
            allow_unfenced=self._options.allow_unfenced,
            prompt=prompt,
            function=answer.metadata.get(ENTRY_POINT),
        )
        if program is None or len(program) > MAX_PROGRAM_CHARACTERS:
            why = "no program in the answer" if program is None else "the program is too long"
            return _nothing(self._options.no_answer_score, why)
        before = text_before(answer.metadata)
        idle_seconds = self._options.idle_seconds
        if answer.first_turn and idle_seconds > FIRST_IDLE_SECONDS:
            findings = self._run(program, problem, before, FIRST_IDLE_SECONDS)
            if findings.by_clock:
                raise PostponedError
        else:
            findings = self._run(program, problem, before, idle_seconds)
            if findings.kept_waiting:
                findings = self._run(program, problem, before, idle_seconds)
        return self._grade(findings)

    def check_row(self, reference: str | None, metadata: Mapping[str, Any]) -> None:  # noqa: ARG002 - part of the interface
        """Raises DataError for a row without tests, with tests that cannot be parsed or passed, or with too many."""
        problem = read_problem(self._options.form, self._tests_columns, metadata, _prompt(metadata, ""))
        before = text_before(metadata)
        suite = problem if isinstance(problem, TestSuite) and problem.comparisons is None else None
        if (suite or before) and (problem_of_tests := rehearsed(self._runner, suite, before=before)) is not None:
            raise DataError(problem_of_tests)
        shortest = 2 * (LEAST_WALL_PER_CPU * self._cpu_seconds(problem) + self._options.idle_seconds)
        if self._options.limit_per_test and self._options.answer_seconds <= shortest:
            raise DataError(
                f"the row has {_num_tests(problem)} tests of cpu_seconds ({self._options.cpu_seconds:g}) each, so that "
                f"answer_seconds ({self._options.answer_seconds:g}) must be above {shortest:g}, four times their sum "
                f"plus twice idle_seconds ({self._options.idle_seconds:g}): "
                "raise it, lower cpu_seconds, or set limit_per_test to false"
            )

    def timeout_grade(self) -> Grade:
        """The grade of an answer that took too long, in spite of the limits of its programs."""
        return _nothing(self._options.incorrect_score, "not graded within answer_seconds")

    def close(self) -> None:
        """Ends the sandbox and the programs in it."""
        self._runner.close()

    def _run(self, program: str, problem: Problem, before: str, idle_seconds: float) -> Findings:
        options = self._options
        runner, tolerance = self._runner, options.float_tolerance
        limits = Limits(
            cpu_seconds=self._cpu_seconds(problem),
            wall_seconds=options.answer_seconds * RUN_FRACTION,
            idle_seconds=idle_seconds,
            memory_bytes=options.memory_mib * MIB,
        )
        if isinstance(problem, InputsOutputs):
            source = f"{before}\n{program}" if before else program
            per_input = options.cpu_seconds if options.limit_per_test else None
            return run_inputs(runner, source, problem, limits=limits, cpu_seconds_each=per_input, tolerance=tolerance)
        if isinstance(problem, Calls):
            return run_calls(runner, program, problem, before=before, limits=limits, tolerance=tolerance)
        if problem.comparisons is not None:
            return run_comparisons(runner, program, problem.comparisons, before=before, limits=limits)
        return run_suite(runner, program, problem, before=before, limits=limits)

    def _cpu_seconds(self, problem: Problem) -> float:
        """CPU limit of a run with all tests."""
        return self._options.cpu_seconds * (_num_tests(problem) if self._options.limit_per_test else 1)

    def _grade(self, findings: Findings) -> Grade:
        if findings.fault is Fault.TESTS:
            fault = ScoreState.INFRASTRUCTURE_FAULT
            return Grade(score=float("nan"), state=fault, reason=printable(findings.reason or ""))
        share = findings.num_passed / findings.num_tests
        earned = share if self._options.partial else float(findings.solved)
        state = ScoreState.MODEL_FAULT if findings.fault is Fault.PROGRAM and not findings.solved else ScoreState.SCORED
        return Grade(
            score=self._options.incorrect_score
            + earned * (self._options.correct_score - self._options.incorrect_score),
            state=state,
            reason=None if findings.solved or findings.reason is None else printable(findings.reason),
            components=dict(zip(COMPONENTS, (share, float(findings.ran), float(findings.compiled)), strict=True)),
            by_clock=findings.by_clock,
        )


def _prompt(metadata: Mapping[str, Any], asked: str | Sequence[Mapping[str, Any]]) -> str:
    """The text that a completion continues: the column `stub`, the prompt itself, or the last message of the user."""
    if (stub := metadata.get(STUB)) is not None:
        if not isinstance(stub, str):
            raise DataError(f"column {STUB!r} must be the code to complete as text, got {stub!r:.80}")
        return stub
    if isinstance(asked, str):
        return asked
    return next((str(turn["content"]) for turn in reversed(asked) if turn["role"] == "user"), "")


def _open_sandbox(options: CodeOptions) -> Sandbox:
    try:
        return Sandbox(waived=options.sandbox_waived, preload=PRELOAD, packages=options.packages)
    except ConfigError as error:
        raise ConfigError(f"sandbox_waived: {error}") from error


def _nothing(score: float, reason: str) -> Grade:
    nothing = dict.fromkeys(COMPONENTS, 0.0)
    return Grade(score=score, state=ScoreState.MODEL_FAULT, reason=reason, components=nothing)


def _num_tests(problem: Problem) -> int:
    match problem:
        case Calls():
            return len(problem.expected)
        case InputsOutputs():
            return len(problem.pairs)
    return len(problem.tests)
