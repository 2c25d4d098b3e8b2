"""The verifier of countdown problems. Expressions are parsed and computed exactly; nothing is evaluated as code."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from proximo.enums import ScoreState
from proximo.errors import DataError
from proximo.rewards.maths.expressions import Expression, MalformedError, read_equation
from proximo.rewards.maths.extraction import FINDERS
from proximo.rewards.verifier import Answer, Grade


class CountdownVerifier:
    """Right is an expression of the given numbers, with the allowed operators, whose exact value is the target.

    Of an equation one side is to be that, and all are to have one value.
    """

    def __init__(
        self,
        *,
        answer_from: Sequence[str],
        numbers_column: str,
        target_column: str,
        number_usage: str,
        operators: Sequence[str],
        correct_score: float,
        incorrect_score: float,
        no_answer_score: float,
    ) -> None:
        """The options are the fields of config/rewards/maths.py."""
        self._answer_from = tuple(answer_from)
        self._columns = (numbers_column, target_column)
        self._exactly = number_usage == "exactly_once"
        self._operators = frozenset(operators)
        self._scores = {"correct": correct_score, "incorrect": incorrect_score, "no_answer": no_answer_score}

    def grade(self, answer: Answer) -> Grade:
        """The grade; components `well_formed` (an expression was read) and `numbers_correct`."""
        numbers, target = self._problem(answer.metadata)
        text = self._equation(answer.text)
        if text is None:
            return self._fault("no expression found")
        try:
            sides = read_equation(text)
        except MalformedError as error:
            return self._fault(f"no expression: {error}")
        usable = [side for side in sides if side.numbers and self._numbers_correct(side, numbers)]
        holds = len({side.value for side in sides}) == 1
        right = holds and any(side.operators <= self._operators and side.value == target for side in usable)
        return Grade(
            score=self._scores["correct" if right else "incorrect"],
            state=ScoreState.SCORED if holds else ScoreState.MODEL_FAULT,
            reason=None if holds else "an equation that does not hold",
            components={"well_formed": 1.0, "numbers_correct": float(bool(usable))},
        )

    def check_row(self, reference: str | None, metadata: Mapping[str, Any]) -> None:  # noqa: ARG002
        """The row must have a list of whole numbers and a whole target in its columns."""
        self._problem(metadata)

    def timeout_grade(self) -> Grade:
        """Of an answer on which the worker was killed: the lowest score, so that no other answer is worth less."""
        return replace(self._fault("grading it took too long"), score=min(self._scores.values()))

    def close(self) -> None:
        """Nothing was started."""

    def _problem(self, metadata: Mapping[str, Any]) -> tuple[list[int], int]:
        numbers, target = (metadata.get(column) for column in self._columns)
        if (
            not isinstance(numbers, Sequence)
            or isinstance(numbers, str)
            or not numbers
            or not all(map(_whole, numbers))
        ):
            raise DataError(
                f"countdown needs a list of whole numbers in the column {self._columns[0]!r} of each row; "
                f"found {numbers!r:.80}. numbers_column names the column"
            )
        if not _whole(target):
            raise DataError(
                f"countdown needs a whole number in the column {self._columns[1]!r} of each row; found {target!r:.80}. "
                "target_column names the column"
            )
        return list(numbers), target

    def _equation(self, text: str) -> str | None:
        """What stands where the answer is: an expression, and what it says to be equal to; without bold face."""
        for place in self._answer_from:
            found = _found(text, place)
            if found is not None:
                return found.strip().removeprefix("**").removesuffix("**")
        return None

    def _numbers_correct(self, expression: Expression, numbers: Sequence[int]) -> bool:
        used, given = Counter(expression.numbers), Counter(numbers)
        return used == given if self._exactly else used <= given

    def _fault(self, reason: str) -> Grade:
        return Grade(
            score=self._scores["no_answer"],
            state=ScoreState.MODEL_FAULT,
            reason=reason,
            components={"well_formed": 0.0, "numbers_correct": 0.0},
        )


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _found(text: str, place: str) -> str | None:
    lines = place == "last_line"
    found = [line for line in text.splitlines() if line.strip()] if lines else FINDERS[place](text, None)
    return found[-1] if found else None
