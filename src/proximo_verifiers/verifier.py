"""The interface of verifiers: what they read of a response, and the grade that they give it.

Both are plain values that cross to a worker process as JSON. A verifier needs nothing else
of the program that asks for grades.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class Finish(StrEnum):
    """Why a response ended."""

    EOS = "eos"
    """The policy wrote an end-of-sequence token; it is the last token."""
    STOP = "stop"
    """A stop token or stop string was completed; it is kept in the tokens."""
    LENGTH = "length"
    """The response was cut at the limit."""
    TERMINATED = "terminated"
    """The environment ended the trajectory."""
    TRUNCATED = "truncated"
    """The environment cut the trajectory, which might have gone on."""
    ABORTED = "aborted"
    """The engine gave up; the response is left out of everything."""

    @property
    def terminated(self) -> bool:
        """True where the policy or the environment ended the answer: the state after the last token is worth 0."""
        return self in (Finish.EOS, Finish.STOP, Finish.TERMINATED)


class ScoreState(StrEnum):
    """Whether a response was scored and, if something failed, whose fault it was."""

    SCORED = "scored"
    MODEL_FAULT = "model_fault"
    """A real low score, with the reason: the answer is at fault."""
    INFRASTRUCTURE_FAULT = "infrastructure_fault"
    """No score: left out of the loss, the group's baseline and every statistic, and counted."""
    NOT_APPLICABLE = "not_applicable"
    """The source does not judge such a response: its weighted sum goes without it. As a fault where no source does."""

    @property
    def has_score(self) -> bool:
        """True for a score that may be trained on."""
        return self in (ScoreState.SCORED, ScoreState.MODEL_FAULT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The part of a response that a verifier reads."""

    text: str
    """The decoded response, without prompt and end-of-sequence token."""
    prompt: str | Sequence[Mapping[str, Any]] = ""
    """The prompt's text, or its messages."""
    reference: str | None = None
    """The reference answer of the prompt, if its row has one."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the prompt's row."""
    finish: Finish = Finish.EOS
    num_tokens: int = 0
    """Number of tokens of the response, including the end-of-sequence token."""
    first_turn: bool = False
    """True if the verifier may raise PostponedError to be called again after all other answers."""


class PostponedError(Exception):
    """Raised by a verifier in the first turn of an answer that would make it wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """The grade of one answer. `score` is NaN if and only if its state has none (`ScoreState.has_score`)."""

    score: float
    state: ScoreState = ScoreState.SCORED
    reason: str | None = None
    """A short reason if the state is a fault. It must not quote more than a line of the answer."""
    components: Mapping[str, float] = field(default_factory=dict)
    by_clock: bool = False
    """A wall-clock limit decided the grade. On a less busy machine it may differ, so it is not cached."""


class Verifier(Protocol):
    """Grades single answers. Runs in a worker process that is killed if an answer takes too long.

    Each worker makes one as `VerifierClass(**options)` with plain options. A grade depends on the answer and the
    options alone. An exception that leaves `grade` is a fault of the infrastructure, so a verifier must catch every
    exception that an answer can cause and grade the answer as at fault.
    """

    def grade(self, answer: Answer) -> Grade:
        """The grade of one answer."""
        ...

    def check_row(self, reference: str | None, metadata: Mapping[str, Any]) -> None:
        """Raises DataError, with what is missing, for a row whose answers cannot be graded."""
        ...

    def close(self) -> None:
        """Ends what the verifier started."""
        ...
