"""The verifier of countdown problems. Expressions are parsed and computed exactly; nothing is evaluated as code.

They are whole numbers without a sign, `+ - * /`, brackets and \\frac{}{}.
"""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeGuard

from proximo_verifiers.errors import DataError, check_choices
from proximo_verifiers.maths.extraction import FINDERS
from proximo_verifiers.verifier import Answer, Grade, ScoreState

COLUMNS = ("nums", "target")
"""Columns of a row: the list of whole numbers, and the whole number to make."""
MAX_CHARACTERS = 500
"""Largest length of an expression."""
MAX_EQUATION_CHARACTERS = 1000
MAX_DIGITS = 9
MAX_NUMBERS = 60
_OTHER = re.compile(r"[^-+*/()\d\s]|//|\*\*", re.ASCII)
_LEADING_ZEROS = re.compile(r"(?<!\d)0+(?=\d)", re.ASCII)
_LONG = re.compile(rf"\d{{{MAX_DIGITS + 1}}}", re.ASCII)
_NUMBER = re.compile(r"\d+", re.ASCII)
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_OPERATORS: dict[type[ast.operator], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_STATED = re.compile(r"-? ?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)
_WRITTEN = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)(?![A-Za-z])|\\[()\[\],;:! $]|\$", " "),
        (r"\\[dt]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:times|cdot|ast)(?![A-Za-z])", "*"),
        (r"[\N{MULTIPLICATION SIGN}\N{MIDDLE DOT}\N{DOT OPERATOR}\N{ASTERISK OPERATOR}]", "*"),
        (r"\\div(?![A-Za-z])|\N{DIVISION SIGN}", "/"),
        (r"[\N{MINUS SIGN}\N{EN DASH}]", "-"),
    )
)


class MalformedError(ValueError):
    """The text is not such an expression; the message says why."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression, with its exact value and what it was made of."""

    value: Fraction | None
    """The exact value; None for a division by 0."""
    numbers: tuple[int, ...]
    """The numbers used, from left to right. Empty for a bare value that is stated as a result, such as -3 or 1,000."""
    operators: frozenset[str]


def read_equation(text: str) -> list[Expression]:
    """The sides of an equation such as `x = (1 + 2) * 3 = 9`, or a single expression. A leading name is left out.

    Raises MalformedError, also if no side uses a number.
    """
    pieces = [piece.strip(" \t\r\n.`") for piece in _plain(text).split("=")]
    sides = [_read_side(piece, may_be_name=number == 0 < len(pieces) - 1) for number, piece in enumerate(pieces)]
    expressions = [side for side in sides if side is not None]
    if not any(side.numbers for side in expressions):
        raise MalformedError("a value without an expression")
    return expressions


def _read_side(piece: str, *, may_be_name: bool) -> Expression | None:
    try:
        return _read(piece)
    except MalformedError:
        if _STATED.fullmatch(piece):
            return Expression(Fraction(piece.replace(",", "").replace(" ", "")), (), frozenset())
        if may_be_name:
            return None
        raise


def _plain(text: str) -> str:
    """The text without LaTeX, except \\frac, and with one character for each operator."""
    if len(text) > MAX_EQUATION_CHARACTERS:
        raise MalformedError(f"more than {MAX_EQUATION_CHARACTERS} characters")
    for pattern, replacement in _WRITTEN:
        text = pattern.sub(replacement, text)
    return text


def _read(text: str) -> Expression:
    if len(text) > MAX_CHARACTERS:
        raise MalformedError(f"more than {MAX_CHARACTERS} characters")
    while _FRACTION.search(text):
        text = _FRACTION.sub(lambda match: f"(({_checked(match[1])})/({_checked(match[2])}))", text)
    text = _checked(text)
    numbers = tuple(map(int, _NUMBER.findall(text)))
    if len(numbers) > MAX_NUMBERS:
        raise MalformedError(f"more than {MAX_NUMBERS} numbers")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except RecursionError as error:
        raise MalformedError("nested too deeply") from error
    return Expression(value, numbers, frozenset("+-*/") & set(text))


def _checked(text: str) -> str:
    """The text as Python of such numbers and marks alone. Raises MalformedError for any other."""
    if other := _OTHER.search(text):
        raise MalformedError(f"{other[0]!r} in an expression")
    plain = _LEADING_ZEROS.sub("", " ".join(text.split()))
    if _LONG.search(plain):
        raise MalformedError(f"a number of more than {MAX_DIGITS} digits")
    try:
        ast.parse(plain, mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise MalformedError("no complete expression") from error
    return plain


def _value(node: ast.expr) -> Fraction | None:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            one, other = _value(left), _value(right)
            if one is None or other is None or (isinstance(kind, ast.Div) and not other):
                return None
            return _OPERATORS[type(kind)](one, other)
    raise MalformedError("no number where one was expected")


class CountdownVerifier:
    """Accepts an expression of the given numbers and allowed operators whose exact value is the target.

    In an equation one side must be such an expression, and all sides must have the same value.
    """

    def __init__(
        self,
        *,
        answer_from: Sequence[str] = ("tags", "boxed", "last_line"),
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
        numbers, target = (metadata.get(column) for column in COLUMNS)
        if (
            not isinstance(numbers, Sequence)
            or isinstance(numbers, str)
            or not numbers
            or not all(map(_is_integer, numbers))
        ):
            raise DataError(
                f"countdown needs a list of whole numbers in the column {COLUMNS[0]!r} of each row; got {numbers!r:.80}"
            )
        if not _is_integer(target):
            raise DataError(
                f"countdown needs a whole number in the column {COLUMNS[1]!r} of each row; got {target!r:.80}"
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
