"""Sections of verifiers in worker processes: your own classes, mathematics, programs with tests, forms of texts."""

import math
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from proximo.config.rewards.sources import NAMES, SourceOfScoresConfig
from proximo.config.schema.base import Section
from proximo_verifiers.sandbox.guarantees import check_names

TEXT_VERIFIERS = "proximo.rewards.text_verifiers"
WORKER_MEMORY_MIB = 4096
AnswerPlace = Literal["boxed", "tags", "hash", "phrase", "label", "number", "pattern", "response"]
Operator = Literal["+", "-", "*", "/"]
LEAST_WALL_PER_CPU = 2.0
"""Wall-clock seconds allowed for each CPU second; the same constant as that of the verifier."""


class VerifierRewardConfig(SourceOfScoresConfig):
    """The keys that all sources with a verifier in worker processes share."""

    implementation: ClassVar[str]
    """`package.module:Class` of the verifier, which each worker constructs with `verifier_options`."""

    workers: int | None = Field(None, ge=1)
    """Worker processes of this source; null for one per core."""
    answer_seconds: float = Field(10.0, gt=0)
    """Wall-clock limit of one answer. A worker that exceeds it is killed, and the answer is tried once more in a worker
    of its own. If that times out too, the answer is at fault and gets the verifier's score for a time-out."""
    step_seconds: float = Field(600.0, gt=0)
    """Wall-clock limit of all answers of a step. An answer that is not graded by then has no score."""

    @property
    def memory_of_a_worker_mib(self) -> int | None:
        """Address space of a worker, and of each process that it starts; None for no limit."""
        return WORKER_MEMORY_MIB

    def verifier_path(self) -> str:
        """The import path of the verifier, `package.module:Class`."""
        return self.implementation

    def caveats(self) -> tuple[str, ...]:
        """Warnings for the user about what the source lacks on this machine."""
        return ()

    def verifier_options(self) -> dict[str, Any]:
        """The keyword arguments of the verifier as plain values: the keys that are specific to this kind."""
        shared = {*VerifierRewardConfig.model_fields, "kind", "name"}
        return self.model_dump(mode="json", exclude=shared)


class AnswerScores(Section):
    """The scores of a verifier that tells correct answers from incorrect ones."""

    correct: float = 1.0
    """Score of a correct answer."""
    incorrect: float = 0.0
    """Score of an incorrect answer. A small positive one rewards the form of an answer."""
    no_answer: float = 0.0
    """Score of a response without an answer; for programs, of one without a program. A lower one than `incorrect`
    teaches the form first."""

    def conflicts(self) -> Iterator[str]:
        if not max(self.incorrect, self.no_answer) < self.correct:
            yield (
                f"correct ({self.correct:g}) must be above incorrect ({self.incorrect:g}) and no_answer "
                f"({self.no_answer:g})"
            )


class AnswerRewardConfig(VerifierRewardConfig):
    """Base of verifiers that tell correct answers from incorrect ones."""

    scores: AnswerScores = Field(default_factory=AnswerScores)
    """What correct, incorrect and missing answers score."""

    def verifier_options(self) -> dict[str, Any]:
        options = super().verifier_options()
        return options | {f"{name}_score": score for name, score in options.pop("scores").items()}


class CustomVerifierRewardConfig(VerifierRewardConfig):
    """Scores by your own verifier class, in worker processes."""

    kind: Literal["verifier"]
    """A verifier class, named by its import path. docs/rewards.md, "A verifier of your own"."""
    verifier_class: str
    """`package.module:Class` with a method `grade`; each worker makes one."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    worker_memory_mib: int | None = Field(WORKER_MEMORY_MIB, ge=128)
    """Address space in MiB of a worker, and of each process that it starts; null for no limit, as a verifier may need
    that loads a model."""

    @property
    def memory_of_a_worker_mib(self) -> int | None:
        return self.worker_memory_mib

    def verifier_path(self) -> str:
        return self.verifier_class

    def verifier_options(self) -> dict[str, Any]:
        return dict(self.kwargs)


class MathsRewardConfig(AnswerRewardConfig):
    """Compares the answer in a response with the reference answer of its row. docs/maths.md."""

    implementation: ClassVar[str] = "proximo_verifiers.maths.verifier:MathsVerifier"

    kind: Literal["maths"]
    """Compares mathematical answers, exactly where it can."""
    answer_from: tuple[AnswerPlace, ...] = Field(("boxed", "tags", "hash", "phrase"), min_length=1)
    """Places to look for the answer, in order; of the first place that has one the last one is used. `boxed`:
    \\boxed{}; `tags`: <answer>...</answer>; `hash`: after ####; `phrase`: after "the answer is"; `label`: a line `A:
    ...`; `number`: the last number; `pattern`: a match of the key `pattern`; `response`: the whole response."""
    pattern: str | None = None
    """Regular expression for `answer_from: [pattern]`, for answers in a form of your own; the answer is its first
    group, or the whole match without groups. A match that takes longer than `answer_seconds` is incorrect."""
    symbolic: Literal["auto", "always", "never"] = "auto"
    """Whether math-verify compares answers that the exact grammar cannot parse. `auto`: if the extra `maths` is
    installed; `always`: the extra must be installed."""

    def caveats(self) -> tuple[str, ...]:
        if self.symbolic != "auto" or find_spec("math_verify") is not None:
            return ()
        return (
            "the extra maths is not installed, so an answer that the exact grammar cannot parse counts as incorrect "
            "unless it is written like the reference: pip install 'proximo[maths]', or set symbolic: never",
        )

    def conflicts(self) -> Iterator[str]:
        if (self.pattern is None) == ("pattern" in self.answer_from):
            yield "pattern and answer_from: [pattern] need each other: set both or neither"
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                yield f"pattern is not a regular expression: {error}"


class CountdownRewardConfig(AnswerRewardConfig):
    """Scores countdown problems: an expression of the given numbers must equal the target. docs/maths.md."""

    implementation: ClassVar[str] = "proximo_verifiers.maths.countdown:CountdownVerifier"

    kind: Literal["countdown"]
    """Parses an arithmetic expression and computes it exactly."""
    answer_from: tuple[Literal["tags", "boxed", "last_line", "response"], ...] = Field(
        ("tags", "boxed", "last_line"), min_length=1
    )
    """Places to look for the expression, in order; the last expression in the first place that has one is used. `tags`:
    <answer>...</answer>; `boxed`: \\boxed{}; `last_line`: the last line; `response`: the whole response."""
    operators: tuple[Operator, ...] = Field(("+", "-", "*", "/"), min_length=1)
    """Allowed operators."""


class CodeRewardConfig(AnswerRewardConfig):
    """Scores programs by the tests that they pass in a sandbox."""

    implementation: ClassVar[str] = "proximo_verifiers.code.verifier:CodeVerifier"

    kind: Literal["code"]
    """Runs the program in a response against the tests of its row."""
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

    def conflicts(self) -> Iterator[str]:
        shortest = self.shortest_answer_seconds
        if self.answer_seconds <= shortest:
            yield (
                f"answer_seconds ({self.answer_seconds:g}) must be above {shortest:g}, four times cpu_seconds "
                f"({self.cpu_seconds:g}) plus twice idle_seconds ({self.idle_seconds:g}), because a program that the "
                "machine kept waiting is run twice: raise answer_seconds, or lower the other two"
            )


class QuickRewardConfig(VerifierRewardConfig):
    """Base of verifiers that take a fraction of a millisecond for an answer, so that one worker is enough."""

    workers: int | None = Field(1, ge=1)
    """Worker processes of this source; null for one per core."""


class PatternRewardConfig(QuickRewardConfig):
    """Scores whether a regular expression matches. docs/text-rewards.md."""

    implementation: ClassVar[str] = f"{TEXT_VERIFIERS}:PatternVerifier"

    kind: Literal["pattern"]
    """One score for a response with a match, another for one without."""
    pattern: str
    """A regular expression of the `regex` package, a superset of Python's. Write it in single quotes, so that YAML
    keeps backslashes; for the whole response begin it with `\\A` and end it with `\\Z`."""
    match_score: float = 1.0
    """Score of a response with a match; a negative one penalises it, and a search that is given up gets it too."""
    no_match_score: float = 0.0
    """Score of a response without a match."""

    @field_validator("pattern")
    @classmethod
    def _is_an_expression(cls, pattern: str) -> str:
        import regex

        try:
            regex.compile(pattern)
        except regex.error as error:
            position = "" if error.pos is None else f" at character {error.pos + 1}"
            raise ValueError(f"{pattern!r} is not a regular expression: {error.msg}{position}") from None
        return pattern


VerifierConfig = Annotated[
    PatternRewardConfig | MathsRewardConfig | CountdownRewardConfig | CodeRewardConfig,
    Field(discriminator="kind"),
]
"""The verifiers that `think_answer` can use; an answer is correct if the verifier scores it 1 or more."""


def _scores_of(verifier: VerifierConfig) -> tuple[float, float]:
    """(score of a correct answer, highest score of any other)."""
    if isinstance(verifier, PatternRewardConfig):  # a pattern may describe wrong answers
        return max(verifier.match_score, verifier.no_match_score), min(verifier.match_score, verifier.no_match_score)
    if isinstance(verifier, AnswerRewardConfig):
        scores = verifier.scores
        return scores.correct, max(scores.incorrect, scores.no_answer)
    return 1.0, 0.0


class ThinkAnswerRewardConfig(VerifierRewardConfig):
    """Scores the form `<think>…</think><answer>…</answer>`, alone or with a verifier. docs/text-rewards.md."""

    implementation: ClassVar[str] = f"{TEXT_VERIFIERS}:ThinkAnswerVerifier"

    kind: Literal["think_answer"]
    """1 for a response of that form, else `min_score`. With `verifier`, 1 for a correct answer in any form; the form
    then distinguishes incorrect answers only."""
    verifier: VerifierConfig | None = None
    """A verifier with its own keys, such as `{kind: pattern, pattern: ...}`. An answer is correct if it scores 1 or
    more."""
    min_score: float = Field(0.0, le=0)
    """Score of a malformed response that is not correct; with a verifier an incorrect answer in the right form gets 0.2
    more. AReaL's scores of 1, -0.8 and -1 need -1."""
    think_in_prompt: bool = False
    """The chat template ends the prompt with `<think>`, so a response begins inside the thought."""

    @model_validator(mode="before")
    @classmethod
    def _one_worker_for_both(cls, given: Any) -> Any:
        """Copy name, worker and limits of this section into the nested verifier, so that its validators see them."""
        verifier = given.get("verifier") if isinstance(given, Mapping) else None
        if isinstance(verifier, VerifierRewardConfig):
            verifier = verifier.model_dump(exclude_unset=True)
        if not isinstance(verifier, Mapping):
            return given
        names = {*VerifierRewardConfig.model_fields} - {"kind"}
        own = {"name": NAMES["think_answer"], **given}
        shared = {name: own.get(name, cls.model_fields[name].default) for name in names}
        others = sorted(name for name in shared if name in verifier and verifier[name] != shared[name])
        if others:
            raise ValueError(
                f"verifier shares the worker of think_answer, whose {', '.join(others)} holds for both: move "
                f"{'them' if len(others) > 1 else 'it'} out of verifier"
            )
        return {**given, "verifier": {**verifier, **shared}}

    def conflicts(self) -> Iterator[str]:
        best, worst = (math.inf, -math.inf) if self.verifier is None else _scores_of(self.verifier)
        if not worst < 1 <= best:
            yield (
                f"verifier scores a correct answer {best:g} and an incorrect one {worst:g}, but think_answer takes a "
                "score of 1 or more as correct and a lower one as incorrect: change its scores"
            )

    @property
    def memory_of_a_worker_mib(self) -> int | None:
        """That of the nested verifier, which runs in the same worker."""
        return super().memory_of_a_worker_mib if self.verifier is None else self.verifier.memory_of_a_worker_mib

    def caveats(self) -> tuple[str, ...]:
        """The caveats of the nested verifier."""
        return () if self.verifier is None else self.verifier.caveats()

    def verifier_options(self) -> dict[str, Any]:
        """The options, with import path and options of the nested verifier in place of its section."""
        if self.verifier is None:
            return {**super().verifier_options(), "verifier": None}
        verifier = {"verifier": self.verifier.implementation, "options": self.verifier.verifier_options()}
        return {**super().verifier_options(), "verifier": verifier}
