"""Config section of the code reward, which runs programs. The execution: rewards/code/."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from proximo.config.rewards.sources import VerifierRewardConfig
from proximo.metrics.definitions import COMPONENT
from proximo.sandbox.guarantees import check_names

LEAST_WALL_PER_CPU = 2.0
"""Equal to the constant of rewards/code/verifier.py, which config may not import."""


class CodeRewardConfig(VerifierRewardConfig):
    """Scores from tests that a program has to pass, run in a sandbox."""

    implementation: ClassVar[str] = "proximo.rewards.code.verifier:CodeVerifier"

    kind: Literal["code"]
    """A program and tests."""
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
    """Columns with code that belongs to the tests, and is run before them and after the program; one that a row does
    not have is left out."""
    before_column: str | None = None
    """Column with code that is put before the program."""
    entry_point_column: str = "entry_point"
    """Column with the name of the function that is asked for, where `form` is `check` or `program` is `completion`."""
    prompt_column: str | None = None
    """Column with the code that a completion goes on from; null for the prompt itself."""
    program: Literal["last_block", "first_block", "all_blocks", "text", "completion"] = "last_block"
    """What of an answer is the program: a fenced block, all of them joined, the whole text, or the prompt's code and
    the answer after it."""
    allow_unfenced: bool = False
    """An answer without a fenced block is taken whole. Without it such an answer has no program."""
    cpu_seconds: float = Field(4.0, gt=0)
    """CPU time that a program may use on all of a row's tests together."""
    idle_seconds: float = Field(5.0, gt=0)
    """Wall-clock time that a program may be idle on all of a row's tests together: neither computing nor waiting for a
    processor, as one that sleeps."""
    limit_per_test: bool = False
    """`cpu_seconds` are for each test: where a program runs once for each input exactly, else as one limit that is
    multiplied by their number."""
    memory_mib: int = Field(512, ge=160)
    """Memory that a program may use, in MiB, the interpreter's own with it. No more than `worker_memory_mib`, which
    holds for what a worker starts, too."""
    float_tolerance: float | None = Field(None, gt=0)
    """How far a number of the output, or of a returned value, may be from the expected one, absolutely or as a part of
    it; null for outputs that are equal. Tests in Python compare by themselves."""
    partial: bool = False
    """The score grows from `incorrect_score` to `correct_score` with the share of tests that pass. Without it every
    test must pass for `correct_score`."""
    correct_score: float = 1.0
    """Score where every test passes."""
    incorrect_score: float = 0.0
    """Score where one does not."""
    no_program_score: float = 0.0
    """Score of an answer without a program."""
    packages: list[str] = Field(default_factory=list)
    """Installed packages that programs and tests may import beside the standard library, by the name that is imported
    (`numpy`), with all that they require. One that is not installed here, or cannot be imported in the sandbox, stops
    the run before it starts."""
    sandbox_waived: list[str] = Field(default_factory=list)
    """Guarantees of the sandbox that this machine cannot give and that the run does without. docs/sandbox.md."""

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
                f"form {self.form} needs {wanted} tests_columns, got {len(self.tests_columns)}: name them, or none for "
                "those of the form"
            )
        return self

    def verifier_options(self) -> dict[str, Any]:
        """The options with the time limit of an answer, which the limits of a program must fit into."""
        return {**super().verifier_options(), "answer_seconds": self.answer_seconds}

    @property
    def shortest_answer_seconds(self) -> float:
        """Shortest time limit of an answer: two runs, each with twice its CPU seconds plus its idle seconds."""
        return 2 * (LEAST_WALL_PER_CPU * self.cpu_seconds + self.idle_seconds)

    @model_validator(mode="after")
    def _time_for_two_runs(self) -> Self:
        shortest = self.shortest_answer_seconds
        if self.answer_seconds <= shortest:
            raise ValueError(
                f"answer_seconds ({self.answer_seconds:g}) must be above {shortest:g}, four times cpu_seconds "
                f"({self.cpu_seconds:g}) and twice idle_seconds ({self.idle_seconds:g}): a program that the machine "
                "keeps waiting is run twice; raise answer_seconds, or lower the other two"
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
