"""The sections of the reward sources for mathematics: answers with a reference, and countdown problems."""

import re
from importlib.util import find_spec
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from proximo.config.rewards.sources import AnswerRewardConfig
from proximo.metrics.definitions import COMPONENT

AnswerPlace = Literal["boxed", "tags", "hash", "phrase", "label", "number", "pattern", "response"]
Operator = Literal["+", "-", "*", "/"]


class MathsRewardConfig(AnswerRewardConfig):
    """Compares the answer in a response with the reference answer of its row. docs/maths.md."""

    implementation: ClassVar[str] = "proximo_verifiers.maths.verifier:MathsVerifier"

    kind: Literal["maths"]
    """Compares mathematical answers, exactly where it can."""
    name: str = Field("maths", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    answer_from: tuple[AnswerPlace, ...] = Field(("boxed", "tags", "hash", "phrase"), min_length=1)
    """Places to look for the answer, in order; the first place that has one is used. `boxed`: \\boxed{}; `tags`:
    <answer>...</answer>; `hash`: after ####; `phrase`: after "the answer is"; `label`: a line `A: ...`; `number`: the
    last number; `pattern`: a match of the key `pattern`; `response`: the whole response."""
    multiple_answers: Literal["last", "first", "agree"] = "last"
    """Which of several answers in one place is used. `first`: for a base model that goes on to further questions.
    `agree`: all must be equal, else the response has no answer."""
    pattern: str | None = None
    """Regular expression for `answer_from: [pattern]`; the answer is its first group, or the whole match without
    groups. A match that takes longer than `answer_seconds` scores as an incorrect one."""
    relative_tolerance: float | None = Field(None, gt=0, lt=1)
    """Largest relative difference between a real number and the reference, for references that are measured or
    rounded; null demands the exact value."""
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

    @model_validator(mode="after")
    def _pattern_that_is_used(self) -> Self:
        if (self.pattern is None) == ("pattern" in self.answer_from):
            raise ValueError("pattern and answer_from: [pattern] need each other: set both or neither")
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"pattern is not a regular expression: {error}") from error
        return self


class CountdownRewardConfig(AnswerRewardConfig):
    """Scores countdown problems: an expression of the given numbers must equal the target. docs/maths.md."""

    implementation: ClassVar[str] = "proximo_verifiers.maths.countdown:CountdownVerifier"

    kind: Literal["countdown"]
    """Parses an arithmetic expression and computes it exactly."""
    name: str = Field("countdown", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
    answer_from: tuple[Literal["tags", "boxed", "last_line", "response"], ...] = Field(
        ("tags", "boxed", "last_line"), min_length=1
    )
    """Places to look for the expression, in order; the last expression in the first place that has one is used. `tags`:
    <answer>...</answer>; `boxed`: \\boxed{}; `last_line`: the last line; `response`: the whole response."""
    number_usage: Literal["exactly_once", "at_most_once"] = "exactly_once"
    """How often each given number must be used; `at_most_once` in the rules of the television game."""
    operators: tuple[Operator, ...] = Field(("+", "-", "*", "/"), min_length=1)
    """Allowed operators."""
