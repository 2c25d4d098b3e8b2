"""The verifier of countdown problems. Expressions are parsed and computed exactly; nothing is evaluated as code."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from proximo_verifiers.errors import DataError, check_choices
from proximo_verifiers.maths.expressions import Expression, MalformedError, read_equation
from proximo_verifiers.maths.extraction import FINDERS
from proximo_verifiers.verifier import Answer, Grade, ScoreState


class CountdownVerifier:
    """Accepts an expression of the given numbers and allowed operators whose exact value is the target.

    In an equation one side must be such an expression, and all sides must have the same value.
    """

    def __init__(
        self,
        *,
        answer_from: Sequence[str] = ("tags", "boxed", "last_line"),
        numbers_column: str = "nums",
        target_column: str = "target",
        number_usage: str = "exactly_once",
        operators: Sequence[str] = ("+", "-", "*", "/"),
        correct_score: float = 1.0,
        incorrect_score: float = 0.0,
        no_answer_score: float = 0.0,
    ) -> None:
        """`answer_from`: places to look for the expression, in order: `tags` (<answer>...</answer>), `boxed`,
        `last_line`, `response`. `number_usage`: each number is used `exactly_once` or `at_most_once`.

        Raises ConfigError for an unknown place, usage or operator.
        """
        check_choices("answer_from has no", answer_from, ("tags", "boxed", "last_line", "response"))
        check_choices("number_usage cannot be", [number_usage], ("exactly_once", "at_most_once"))
        check_choices("operators cannot have", operators, ("+", "-", "*", "/"))
        self._answer_from = tuple(answer_from)
        self._columns = (numbers_column, target_column)
        self._exactly = number_usage == "exactly_once"
        self._operators = frozenset(operators)
        self._scores = {"correct": correct_score, "incorrect": incorrect_score, "no_answer": no_answer_score}

    def grade(self, answer: Answer) -> Grade:
        """The grade, with the components `well_formed` (an expression was parsed) and `numbers_correct`, each 0 or
        1."""
        numbers, target = self._problem(answer.metadata)
        text = self._equation(answer.text)
        if text is None:
            return self._fault("no expression found")
        try:
            sides = read_equation(text)
        except MalformedError as error:
            return self._fault(f"not an expression: {error}")
        usable = [side for side in sides if side.numbers and self._numbers_correct(side, numbers)]
        holds = len({side.value for side in sides}) == 1
        correct = holds and any(side.operators <= self._operators and side.value == target for side in usable)
        return Grade(
            score=self._scores["correct" if correct else "incorrect"],
            state=ScoreState.SCORED if holds else ScoreState.MODEL_FAULT,
            reason=None if holds else "a false equation",
            components={"well_formed": 1.0, "numbers_correct": float(bool(usable))},
        )

    def check_row(self, reference: str | None, metadata: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Raises DataError for a row without a list of integers and an integer target in its columns."""
        self._problem(metadata)

    def timeout_grade(self) -> Grade:
        """The grade of an answer that took too long: the lowest score of all, so that no answer gains by it."""
        return replace(self._fault("grading it took too long"), score=min(self._scores.values()))

    def close(self) -> None:
        """Does nothing: there is no process to end."""

    def _problem(self, metadata: Mapping[str, Any]) -> tuple[list[int], int]:
        numbers, target = (metadata.get(column) for column in self._columns)
        if (
            not isinstance(numbers, Sequence)
            or isinstance(numbers, str)
            or not numbers
            or not all(map(_is_integer, numbers))
        ):
            raise DataError(
                f"countdown needs a list of whole numbers in the column {self._columns[0]!r} of each row; "
                f"got {numbers!r:.80}. numbers_column names the column"
            )
        if not _is_integer(target):
            raise DataError(
                f"countdown needs a whole number in the column {self._columns[1]!r} of each row; got {target!r:.80}. "
                "target_column names the column"
            )
        return list(numbers), target

    def _equation(self, text: str) -> str | None:
        """The expression or equation in the first place that has one, without bold face; None if there is none."""
        for place in self._answer_from:
            equation = _last_in(text, place)
            if equation is not None:
                return equation.strip().removeprefix("**").removesuffix("**")
        return None

    def _numbers_correct(self, expression: Expression, numbers: Sequence[int]) -> bool:
        used, available = Counter(expression.numbers), Counter(numbers)
        return used == available if self._exactly else used <= available

    def _fault(self, reason: str) -> Grade:
        return Grade(
            score=self._scores["no_answer"],
            state=ScoreState.MODEL_FAULT,
            reason=reason,
            components={"well_formed": 0.0, "numbers_correct": 0.0},
        )


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _last_in(text: str, place: str) -> str | None:
    if place == "last_line":
        candidates = [line for line in text.splitlines() if line.strip()]
    else:
        candidates = FINDERS[place](text, None)
    return candidates[-1] if candidates else None
