"""Sections of the reward sources that read a response as text: the tags of thought and answer, a pattern."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from proximo.config.rewards.verifiers import (
    AnswerRewardConfig,
    CodeRewardConfig,
    CountdownRewardConfig,
    MathsRewardConfig,
    VerifierRewardConfig,
)
from proximo.metrics.definitions import COMPONENT

VERIFIERS = "proximo.rewards.text_verifiers"


class QuickRewardConfig(VerifierRewardConfig):
    """Base of verifiers that take a fraction of a millisecond for an answer, so that one worker is enough."""

    workers: int | None = Field(1, ge=1)
    """Worker processes of this source; null for one per core."""


class PatternRewardConfig(QuickRewardConfig):
    """Scores whether a regular expression matches. docs/text-rewards.md."""

    implementation: ClassVar[str] = f"{VERIFIERS}:PatternVerifier"

    kind: Literal["pattern"]
    """One score for a response with a match, another for one without."""
    name: str = Field("pattern", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
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

    implementation: ClassVar[str] = f"{VERIFIERS}:ThinkAnswerVerifier"

    kind: Literal["think_answer"]
    """1 for a response of that form, else `min_score`. With `verifier`, 1 for a correct answer in any form; the form
    then distinguishes incorrect answers only."""
    name: str = Field("form", pattern=f"^{COMPONENT}$")
    """Name of this component in the metrics."""
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
        shared = {name: given.get(name, cls.model_fields[name].default) for name in names}
        others = sorted(name for name in shared if name in verifier and verifier[name] != shared[name])
        if others:
            raise ValueError(
                f"verifier shares the worker of think_answer, whose {', '.join(others)} holds for both: move "
                f"{'them' if len(others) > 1 else 'it'} out of verifier"
            )
        return {**given, "verifier": {**verifier, **shared}}

    @model_validator(mode="after")
    def _scores_on_both_sides_of_one(self) -> Self:
        best, worst = (math.inf, -math.inf) if self.verifier is None else _scores_of(self.verifier)
        if not worst < 1 <= best:
            raise ValueError(
                f"verifier scores a correct answer {best:g} and an incorrect one {worst:g}, but think_answer takes a "
                "score of 1 or more as correct and a lower one as incorrect: change its scores"
            )
        return self

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
