"""A parser of arithmetic expressions over integers. It computes the value exactly and records the numbers used.

    sum      = product { ("+" | "-") product }
    product  = atom { ("*" | "/") atom }
    atom     = digits | "(" sum ")" | \\frac "{" sum "}" "{" sum "}"

There are no signed numbers: a minus stands between two values.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 500
"""Largest length of an expression."""
MAX_EQUATION_CHARACTERS = 1000
MAX_DIGITS = 9
MAX_NUMBERS = 60
MAX_NESTING = 30

_TOKEN = re.compile(r"(\d+)|(\\frac|[-+*/(){}])|\s+|(.)", re.ASCII | re.DOTALL)
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


def read_expression(text: str) -> Expression:
    """Parses one expression. Raises MalformedError."""
    return _read(_plain(text))


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
    parser = _Parser(_tokens(text))
    value = parser.parse()
    return Expression(value, tuple(parser.numbers), frozenset(parser.operators))


def _tokens(text: str) -> list[str]:
    tokens = []
    for digits, mark, other in _TOKEN.findall(text):
        if other:
            raise MalformedError(f"{other!r} in an expression")
        if len(digits) > MAX_DIGITS:
            raise MalformedError(f"a number of more than {MAX_DIGITS} digits")
        if digits or mark:
            tokens.append(digits or mark)
    return tokens


class _Parser:
    """A recursive descent parser that collects `numbers` and `operators`."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = [*tokens, ""]
        self._position = 0
        self._depth = 0
        self.numbers: list[int] = []
        self.operators: set[str] = set()

    def parse(self) -> Fraction | None:
        value = self._sum()
        if self._next:
            raise MalformedError(f"{self._next!r} after an expression")
        return value

    @property
    def _next(self) -> str:
        return self._tokens[self._position]

    def _take(self) -> str:
        token = self._next
        self._position += 1
        return token

    def _expect(self, mark: str) -> None:
        if self._next != mark:
            raise MalformedError(f"{mark!r} is missing")
        self._position += 1

    def _sum(self) -> Fraction | None:
        value = self._product()
        while self._next in ("+", "-"):
            value = self._combine(self._take(), value, self._product())
        return value

    def _product(self) -> Fraction | None:
        value = self._atom()
        while self._next in ("*", "/"):
            value = self._combine(self._take(), value, self._atom())
        return value

    def _combine(self, operator: str, one: Fraction | None, other: Fraction | None) -> Fraction | None:
        self.operators.add(operator)
        if one is None or other is None or (operator == "/" and not other):
            return None
        match operator:
            case "+":
                return one + other
            case "-":
                return one - other
            case "*":
                return one * other
        return one / other

    def _atom(self) -> Fraction | None:
        token = self._next
        if token.isdecimal():
            self._position += 1
            self.numbers.append(int(token))
            if len(self.numbers) > MAX_NUMBERS:
                raise MalformedError(f"more than {MAX_NUMBERS} numbers")
            return Fraction(self.numbers[-1])
        if token == "(":
            return self._enclosed("(", ")")
        if token == "\\frac":
            self._position += 1
            above = self._enclosed("{", "}")
            return self._combine("/", above, self._enclosed("{", "}"))
        raise MalformedError(f"{token!r} where a number was expected" if token else "an incomplete expression")

    def _enclosed(self, opening: str, closing: str) -> Fraction | None:
        self._expect(opening)
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise MalformedError(f"more than {MAX_NESTING} nested brackets")
        value = self._sum()
        self._depth -= 1
        self._expect(closing)
        return value
