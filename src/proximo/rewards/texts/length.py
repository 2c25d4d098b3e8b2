"""How far a response's length is from a range. Not the limit of a rollout: DAPO's overlong penalty is in ppo.score."""

from typing import Literal

from proximo.enums import ScoreState
from proximo.rewards.verifier import Answer, Grade, Verifier

Unit = Literal["tokens", "words", "characters"]


class LengthVerifier(Verifier):
    """score = max(0, 1 - distance / `slack`): 1 within `shortest` to `longest`, both inclusive, and linear outside.

    `distance` is how many units the response is too short or too long; with a slack of 0 the score outside is 0. Words
    are what blanks separate. Tokens are those of the response, its end-of-sequence token included.
    """

    def __init__(
        self, *, unit: Unit = "words", shortest: int | None = None, longest: int | None = None, slack: int = 0
    ) -> None:
        self.unit = unit
        self.shortest = shortest
        self.longest = longest
        self.slack = slack

    def grade(self, answer: Answer) -> Grade:
        """`components`: `length`, in the unit."""
        length = measured(answer, self.unit)
        too_short = 0 if self.shortest is None else max(0, self.shortest - length)
        too_long = 0 if self.longest is None else max(0, length - self.longest)
        distance = too_short + too_long  # at most one of them is not 0
        score = max(0.0, 1 - distance / self.slack) if self.slack else float(distance == 0)
        return Grade(score=score, components={"length": float(length)})

    def timeout_grade(self) -> Grade:
        """What an answer gets that the worker was killed over."""
        return Grade(score=0.0, state=ScoreState.MODEL_FAULT, components={"length": 0.0})


def measured(answer: Answer, unit: Unit) -> int:
    """The length of a response."""
    match unit:
        case "tokens":
            return answer.num_tokens
        case "words":
            return len(answer.text.split())
        case "characters":
            return len(answer.text)
