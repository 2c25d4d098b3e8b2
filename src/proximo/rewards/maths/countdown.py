"""The judge of countdown: make the target from the numbers. The expression is parsed and counted, never evaluated."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from proximo.errors import DataError
from proximo.rewards.maths.expressions import Expression, MalformedError, read_expression
from proximo.rewards.maths.extraction import boxed
from proximo.rewards.verdicts import Answer, Verdict
from proximo.states import ScoreState

_TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_CLAIM = re.compile(r"=\s*-?[\d.,]+\s*[.$]*\s*$", re.ASCII)
MAX_LAST_LINE = 1000


class CountdownJudge:
    """Right is an expression of the given numbers, with the allowed operators, whose exact value is the target."""

    def __init__(
        self,
        *,
        answer_from: Sequence[str],
        numbers_column: str,
        target_column: str,
        each_number: str,
        operators: Sequence[str],
        right: float,
        wrong: float,
        no_answer: float,
    ) -> None:
        """The options are the fields of config/rewards_maths.py."""
        self._answer_from = tuple(answer_from)
        self._columns = (numbers_column, target_column)
        self._exactly = each_number == "exactly_once"
        self._operators = frozenset(operators)
        self._scores = {"right": right, "wrong": wrong, "no_answer": no_answer}

    def judge(self, answer: Answer) -> Verdict:
        """The verdict; components `well_formed` (an expression was read) and `numbers_right`."""
        numbers, target = self._problem(answer.metadata)
        text = self._expression(answer.text)
        if text is None:
            return self._fault("no expression found")
        try:
            expression = read_expression(text)
        except MalformedError as error:
            return self._fault(f"no expression: {error}")
        numbers_right = self._numbers_right(expression, numbers)
        allowed = expression.operators <= self._operators
        right = numbers_right and allowed and expression.value == target
        return Verdict(
            score=self._scores["right" if right else "wrong"],
            components={"well_formed": 1.0, "numbers_right": float(numbers_right)},
        )

    def check_row(self, reference: str | None, metadata: Mapping[str, Any]) -> None:  # noqa: ARG002
        """The row must have a list of whole numbers and a whole target in its columns."""
        self._problem(metadata)

    def timeout_verdict(self) -> Verdict:
        """Of an answer on which the worker was killed: the lowest score, so that no other answer is worth less."""
        return replace(self._fault("judging it took too long"), score=min(self._scores.values()))

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

    def _expression(self, text: str) -> str | None:
        """Where the answer stands, without what it says to be equal to."""
        for place in self._answer_from:
            found = _found(text, place)
            if found is not None:
                return _CLAIM.sub("", found[:MAX_LAST_LINE]).rpartition("=")[2].strip().strip(".`")
        return None

    def _numbers_right(self, expression: Expression, numbers: Sequence[int]) -> bool:
        used, given = Counter(expression.numbers), Counter(numbers)
        return used == given if self._exactly else used <= given

    def _fault(self, reason: str) -> Verdict:
        return Verdict(
            score=self._scores["no_answer"],
            state=ScoreState.MODEL_FAULT,
            reason=reason,
            components={"well_formed": 0.0, "numbers_right": 0.0},
        )


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _found(text: str, place: str) -> str | None:
    match place:
        case "tags":
            found = _TAGS.findall(text)
        case "boxed":
            found = boxed(text)
        case "last_line":
            found = [line for line in text.splitlines() if line.strip()]
        case _:
            found = [text]
    return found[-1] if found else None
