"""The section of the reward source that runs programs against tests."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from proximo.config.rewards.sources import WORKER_MEMORY_MIB, AnswerRewardConfig
from proximo.metrics.definitions import COMPONENT
from proximo_verifiers.sandbox.guarantees import check_names

LEAST_WALL_PER_CPU = 2.0
"""Wall-clock seconds allowed for each CPU second; the same constant as that of the verifier."""


class CodeRewardConfig(AnswerRewardConfig):
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
    """`cpu_seconds` count per test, as the limits of programming contests do: as an exact limit where the program runs
    once per input, else as one limit multiplied by the number of tests."""
    memory_mib: int = Field(512, ge=160)
    """Memory of a program in MiB, including the interpreter's; programs with packages such as numpy may need more."""
    float_tolerance: float | None = Field(None, gt=0)
    """Largest absolute or relative difference between a number in the output, or in a returned value, and the expected
    number, for problems whose results are rounded; null demands equality. Tests written in Python do their own
    comparison."""
    partial: bool = False
    """The score grows from `scores.incorrect` to `scores.correct` with the share of tests that pass, for a policy that
    solves nothing at first. Without it every test must pass."""
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

    def verifier_options(self) -> dict[str, Any]:
        """The options, with `answer_seconds`, which the limits of a program must fit into."""
        return {**super().verifier_options(), "answer_seconds": self.answer_seconds}

    @property
    def memory_of_a_worker_mib(self) -> int:
        """That of other workers, or what a program may take, since programs inherit the limit of the worker."""
        return max(WORKER_MEMORY_MIB, self.memory_mib)

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
