"""What a verifier reads of a response and what it says of it: plain values, which cross to a worker as JSON.

Not a response's tokens and log-probs: those are in records.py, which needs torch, and a worker does without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proximo.enums import Finish, ScoreState


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One response as a verifier sees it."""

    text: str
    """The decoded response: it starts where the prompt's tokens end, and has no end-of-sequence token."""
    prompt: str | Sequence[Mapping[str, Any]]
    """The prompt's text, or its messages."""
    reference: str | None = None
    """The prompt's reference answer, where its row has one."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the prompt's row."""
    finish: Finish = Finish.EOS
    num_tokens: int = 0
    """Tokens of the response, end-of-sequence token included."""
    first_turn: bool = False
    """The verifier may raise PostponedError: it is asked again when the other answers have had their turn."""


class PostponedError(Exception):
    """An answer that makes its verifier wait, in its first turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """What a verifier says of one answer. `score` is NaN where, and only where, the infrastructure is at fault."""

    score: float
    state: ScoreState = ScoreState.SCORED
    reason: str | None = None
    """Why, in a few words, where the state is a fault; must quote no more than a line of the answer."""
    components: Mapping[str, float] = field(default_factory=dict)
    by_clock: bool = False
    """A limit of wall-clock time decided: on a machine with less to do it may be another grade. Not remembered."""


class Verifier(Protocol):
    """Gives grades on single answers. It lives in a worker process that is killed when it takes too long.

    Made as `VerifierClass(**options)` with plain options, once per worker. A grade depends on the answer and the
    options alone. An exception that leaves `grade` is a fault of the infrastructure: what the answer can cause, the
    verifier must catch and call the model's fault.
    """

    def grade(self, answer: Answer) -> Grade:
        """The grade on one answer."""
        ...

    def check_row(self, reference: str | None, metadata: Mapping[str, Any]) -> None:
        """Raises DataError, with what is missing, for a prompt that no answer to could be graded."""
        ...

    def close(self) -> None:
        """Ends what the verifier started."""
        ...
