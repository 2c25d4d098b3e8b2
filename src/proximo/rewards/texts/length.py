"""The verifier of lengths. (DAPO's penalty for overlong responses is part of ppo.score.)"""

from typing import Literal

from proximo_verifiers.verifier import Answer, Grade, ScoreState, Verifier

Unit = Literal["tokens", "words", "characters"]


class LengthVerifier(Verifier):
    """score = max(0, 1 - distance / `slack`), where distance is the number of units outside `shortest` to `longest`.

    Both ends are inclusive. With a slack of 0 the score outside the range is 0. Words are separated by white space.
    Tokens include the end-of-sequence token.
    """

    def __init__(
        self, *, unit: Unit = "words", shortest: int | None = None, longest: int | None = None, slack: int = 0
    ) -> None:
        self.unit = unit
        self.shortest = shortest
        self.longest = longest
        self.slack = slack

    def grade(self, answer: Answer) -> Grade:
        """The grade, with the component `length` in units."""
        length = measured(answer, self.unit)
        too_short = 0 if self.shortest is None else max(0, self.shortest - length)
        too_long = 0 if self.longest is None else max(0, length - self.longest)
        distance = too_short + too_long  # at most one is not 0
        score = max(0.0, 1 - distance / self.slack) if self.slack else float(distance == 0)
        return Grade(score=score, components={"length": float(length)})

    def timeout_grade(self) -> Grade:
        """The grade of an answer that took too long: 0."""
        return Grade(score=0.0, state=ScoreState.MODEL_FAULT, components={"length": 0.0})


def measured(answer: Answer, unit: Unit) -> int:
    """The length of a response in units."""
    match unit:
        case "tokens":
            return answer.num_tokens
        case "words":
            return len(answer.text.split())
        case "characters":
            return len(answer.text)
