"""The section of the reward source that runs programs against tests."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from proximo.config.rewards.sources import VerifierRewardConfig
from proximo.metrics.definitions import COMPONENT
from proximo_verifiers.sandbox.guarantees import check_names

LEAST_WALL_PER_CPU = 2.0
"""Wall-clock seconds allowed for each CPU second; the same constant as that of the verifier."""


class CodeRewardConfig(VerifierRewardConfig):
    """Scores programs by the tests that they pass in a sandbox."""

    implementation: ClassVar[str] = "proximo_verifiers.code.verifier:CodeVerifier"

    kind: Literal["code"]
    """Runs the program in a response against the tests of its row."""
    name: str = Field("code", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    answer_seconds: float = Field(120.0, gt=0)
    """Wall-clock limit of one answer with all its tests, counted from when its grading begins; the time in the queue is
    limited by `step_seconds` alone. A program gets 0.45 of it, so that a program which the machine kept waiting can be
    run a second time. Must exceed 4 times `cpu_seconds` plus 2 times `idle_seconds`. With `limit_per_test`,
    `cpu_seconds` count once per test, and a row with too many tests stops the run before it starts."""
    form: Literal["asserts", "check", "stdio", "input_output"]
    """What tests a row has. `asserts`: statements that call a function (MBPP). `check`: a function `check(candidate)`
    (HumanEval). `stdio`: inputs and outputs in two columns. `input_output`: both in one column of JSON, with `fn_name`
    where a function is to be called (APPS, TACO). docs/code.md, "Forms"."""
    tests_columns: list[str] = Field(default_factory=list)
    """Columns with the tests; empty for those of the form: `test_list`, `test`, `inputs` and `outputs`, or
    `input_output`."""
    setup_columns: list[str] = Field(default_factory=lambda: ["test_setup_code", "test_imports"])
    """Columns with set-up code of the tests, which runs after the program and before the first test. A column that a
    row lacks is skipped."""
    before_column: str | None = None
    """Column with code that is prepended to the program."""
    entry_point_column: str = "entry_point"
    """Column with the name of the requested function, for `form: check` and `program: completion`."""
    prompt_column: str | None = None
    """Column with the code that a completion continues; null for the prompt itself."""
    program: Literal["last_block", "first_block", "all_blocks", "response", "completion"] = "last_block"
    """Which part of a response is the program: a fenced block, all of them joined, the whole response, or the prompt's
    code followed by the response."""
    allow_unfenced: bool = False
    """Take a response without a fenced block as a program. Without this key such a response has no program."""
    cpu_seconds: float = Field(4.0, gt=0)
    """CPU seconds that a program may use for all tests of a row together."""
    idle_seconds: float = Field(5.0, gt=0)
    """Seconds that a program may be idle for all tests of a row together. A program is idle while it neither computes
    nor waits for a processor, for example in a sleep."""
    limit_per_test: bool = False
    """`cpu_seconds` count per test: as an exact limit where the program runs once per input, else as one limit
    multiplied by the number of tests."""
    memory_mib: int = Field(512, ge=160)
    """Memory of a program in MiB, including the interpreter's. At most `worker_memory_mib`, which programs inherit from
    the worker."""
    float_tolerance: float | None = Field(None, gt=0)
    """Largest absolute or relative difference between a number in the output, or in a returned value, and the expected
    number; null demands equality. Tests written in Python do their own comparison."""
    partial: bool = False
    """The score grows from `incorrect_score` to `correct_score` with the share of tests that pass. Without it every
    test must pass for `correct_score`."""
    correct_score: float = 1.0
    """Score of a program that passes every test."""
    incorrect_score: float = 0.0
    """Score of a program that fails a test."""
    no_program_score: float = 0.0
    """Score of a response without a program."""
    packages: list[str] = Field(default_factory=list)
    """Installed packages that programs and tests may import beside the standard library, by import name (`numpy`); what
    they require is included. A package that is not installed, or cannot be imported in the sandbox, stops the run
    before it starts."""
    sandbox_waived: list[str] = Field(default_factory=list)
    """Guarantees of the sandbox that this run does without because the machine cannot give them. docs/sandbox.md."""

    @field_validator("sandbox_waived")
    @classmethod
    def _known_guarantees(cls, value: list[str]) -> list[str]:
        check_names(value, ())
        return value

    @model_validator(mode="after")
    def _columns_of_the_form(self) -> Self:
        wanted = {"stdio": 2, "input_output": 1}.get(self.form)
        if self.tests_columns and wanted is not None and len(self.tests_columns) != wanted:
            raise ValueError(
                f"form {self.form} needs {wanted} tests_columns, got {len(self.tests_columns)}: name all of them, or "
                "none to use the form's default columns"
            )
        return self

    def verifier_options(self) -> dict[str, Any]:
        """The options, with `answer_seconds`, which the limits of a program must fit into."""
        return {**super().verifier_options(), "answer_seconds": self.answer_seconds}

    @property
    def shortest_answer_seconds(self) -> float:
        """Lower bound of `answer_seconds`: two runs, each with twice its CPU seconds and its idle seconds."""
        return 2 * (LEAST_WALL_PER_CPU * self.cpu_seconds + self.idle_seconds)

    @model_validator(mode="after")
    def _time_for_two_runs(self) -> Self:
        shortest = self.shortest_answer_seconds
        if self.answer_seconds <= shortest:
            raise ValueError(
                f"answer_seconds ({self.answer_seconds:g}) must be above {shortest:g}, four times cpu_seconds "
                f"({self.cpu_seconds:g}) plus twice idle_seconds ({self.idle_seconds:g}), because a program that the "
                "machine kept waiting is run twice: raise answer_seconds, or lower the other two"
            )
        return self

    @model_validator(mode="after")
    def _memory_of_the_worker(self) -> Self:
        if self.worker_memory_mib is not None and self.memory_mib > self.worker_memory_mib:
            raise ValueError(
                f"memory_mib ({self.memory_mib}) must be at most worker_memory_mib ({self.worker_memory_mib}), which "
                "programs inherit: raise worker_memory_mib, or set it to null"
            )
        return self

    @model_validator(mode="after")
    def _scores_in_order(self) -> Self:
        if not max(self.incorrect_score, self.no_program_score) < self.correct_score:
            raise ValueError(
                f"correct_score ({self.correct_score:g}) must be above incorrect_score ({self.incorrect_score:g}) and "
                f"no_program_score ({self.no_program_score:g})"
            )
        return self
