"""The interface of verifiers: what they read of a response, and the grade that they give it.

Both are plain values that cross to a worker process as JSON. The records of responses (records.py) need torch, which
workers do without.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proximo.enums import Finish, ScoreState


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The part of a response that a verifier reads."""

    text: str
    """The decoded response, without prompt and end-of-sequence token."""
    prompt: str | Sequence[Mapping[str, Any]]
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
