"""How a response ended, and what its score is worth. Apart from the records, so that a worker needs no torch."""

from enum import StrEnum


class Finish(StrEnum):
    """Why a response ended."""

    EOS = "eos"
    """The policy wrote an end-of-sequence token; it is the last token."""
    STOP = "stop"
    """A stop token or stop string was completed; it is kept in the tokens."""
    LENGTH = "length"
    """The response was cut at the limit."""
    ABORTED = "aborted"
    """The engine gave up; the response is left out of everything."""

    @property
    def terminated(self) -> bool:
        """True where the policy itself ended the answer: the state after the last token is worth 0."""
        return self in (Finish.EOS, Finish.STOP)


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
