"""Config sections of the mathematics rewards: reference answers and countdown. The grading: rewards/maths/."""

import re
from importlib.util import find_spec
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from proximo.config.rewards.sources import VerifierRewardConfig
from proximo.metrics.definitions import COMPONENT

AnswerPlace = Literal["boxed", "tags", "hash", "phrase", "label", "number", "pattern", "response"]
Operator = Literal["+", "-", "*", "/"]


class MathsRewardConfig(VerifierRewardConfig):
    """Scores of answers that are compared with the row's reference answer. docs/maths.md."""

    implementation: ClassVar[str] = "proximo.rewards.maths.verifier:MathsVerifier"

    kind: Literal["maths"]
    """A mathematical answer, compared exactly."""
    name: str = Field("maths", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    answer_from: tuple[AnswerPlace, ...] = Field(("boxed", "tags", "hash", "phrase"), min_length=1)
    """Where the answer is looked for; the first place that has one counts. `boxed`: \\boxed{}; `tags`:
    <answer>...</answer>; `hash`: behind ####;
    `phrase`: behind "the answer is"; `label`: a line `A: ...`; `number`: the last number; `pattern`: the key `pattern`;
    `response`: the whole response."""
    answers_column: str | None = "answers"
    """Column with a list of reference answers, beside the row's own; right is what equals any of them. A row without
    that column has its own alone, and null is for all rows the same."""
    multiple_answers: Literal["last", "first", "agree"] = "last"
    """Which of several answers in one place counts. `agree`: all must be the same, else there is none."""
    pattern: str | None = None
    """A regular expression, for `answer_from: [pattern]`; the answer is its first group, or all of it without groups.
    One that takes too long on an answer costs the worker its deadline (`answer_seconds`) and the answer its score."""
    relative_tolerance: float | None = Field(None, gt=0, lt=1)
    """How far a real number may be from the reference, as a part of it; null demands the exact value."""
    symbolic: Literal["auto", "always", "never"] = "auto"
    """Whether math-verify decides what the exact grammar cannot read. `auto`: where the extra `maths` is installed;
    `always`: it must be installed."""
    symbolic_cpu_seconds: float = Field(0.8, gt=0)
    """Processor time that math-verify has for one answer; then the answer is wrong."""
    correct_score: float = 1.0
    """Score of a right answer."""
    incorrect_score: float = 0.0
    """Score of a wrong answer."""
    no_answer_score: float = 0.0
    """Score of a response in which no answer is found."""

    def caveats(self) -> tuple[str, ...]:
        if self.symbolic != "auto" or find_spec("math_verify") is not None:
            return ()
        return (
            "the extra maths is not installed, so answers that the exact grammar cannot read count as wrong unless "
            "they are written like the reference: pip install 'proximo[maths]', or say symbolic: never",
        )

    @model_validator(mode="after")
    def _pattern_that_is_used(self) -> Self:
        if (self.pattern is None) == ("pattern" in self.answer_from):
            raise ValueError("pattern and answer_from: [pattern] belong together: give both or neither")
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"pattern is no regular expression: {error}") from error
        return self

    @model_validator(mode="after")
    def _scores_in_order(self) -> Self:
        _check_order(self)
        return self


class CountdownRewardConfig(VerifierRewardConfig):
    """Scores of countdown: an expression of the given numbers that makes the target. docs/maths.md."""

    implementation: ClassVar[str] = "proximo.rewards.maths.countdown:CountdownVerifier"

    kind: Literal["countdown"]
    """An expression, parsed and computed exactly."""
    name: str = Field("countdown", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    answer_from: tuple[Literal["tags", "boxed", "last_line", "response"], ...] = Field(
        ("tags", "boxed", "last_line"), min_length=1
    )
    """Where the expression is looked for; the first place that has one counts, and its last. `tags`:
    <answer>...</answer>; `boxed`: \\boxed{}; `last_line`: the last line; `response`: the whole response."""
    numbers_column: str = "nums"
    """Column of the row with the list of whole numbers."""
    target_column: str = "target"
    """Column of the row with the whole number to make."""
    number_usage: Literal["exactly_once", "at_most_once"] = "exactly_once"
    """How often each of the numbers is to be used."""
    operators: tuple[Operator, ...] = Field(("+", "-", "*", "/"), min_length=1)
    """The operators that are allowed."""
    correct_score: float = 1.0
    """Score of an expression that makes the target."""
    incorrect_score: float = 0.0
    """Score of any other expression: a small one rewards the form."""
    no_answer_score: float = 0.0
    """Score of a response without an expression."""

    @model_validator(mode="after")
    def _scores_in_order(self) -> Self:
        _check_order(self)
        return self


def _check_order(section: MathsRewardConfig | CountdownRewardConfig) -> None:
    if not max(section.incorrect_score, section.no_answer_score) < section.correct_score:
        raise ValueError(
            f"correct_score ({section.correct_score:g}) must be above incorrect_score ({section.incorrect_score:g}) "
            f"and no_answer_score ({section.no_answer_score:g})"
        )
