"""What an answer can be: a number, or several in some order. Not how it is written: that is grammar.py."""

from dataclasses import dataclass
from fractions import Fraction

from proximo.rewards.maths.rational_functions import Quotient, RefusedError, UnreadableError


@dataclass(frozen=True, slots=True)
class Infinity:
    """An end of an interval that is not there."""

    sign: int


@dataclass(frozen=True, slots=True)
class Several:
    """Items in brackets: a tuple, a vector or an interval; in braces: a set; without: a list in any order."""

    opening: str
    items: "tuple[Value, ...]"
    closing: str
    is_interval: bool = False
    """Known to be one, since an inequality says so; (1, 5) may also be a point."""

    @property
    def ordered(self) -> bool:
        """Whether it matters which item stands first."""
        return self.opening not in ("", "{")


@dataclass(frozen=True, slots=True)
class Union:
    """Intervals or sets joined by \\cup."""

    parts: "tuple[Value, ...]"


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of entries."""

    rows: "tuple[tuple[Value, ...], ...]"


@dataclass(frozen=True, slots=True)
class Equation:
    """An equation: `name = value` where one side is but a name."""

    name: str | None
    left: "Value"
    right: "Value"


Value = Quotient | Infinity | Several | Union | Matrix | Equation


def repeating(text: str) -> Fraction:
    """0.1\\overline{6} is 1/6: the period of n digits counts for itself over 10^n - 1."""
    digits, _, period = text.rstrip("}").partition("\\overline")
    period = period.strip().lstrip("{")
    whole, _, fixed = digits.partition(".")
    start = Fraction(int(whole + fixed or "0"), 10 ** len(fixed))
    return start + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))


def whole_number(value: Quotient, largest: int) -> int:
    """A whole number from 0 to `largest`; RefusedError above it."""
    number = value.constant()
    if number is None or number.denominator != 1 or number < 0:
        raise UnreadableError("a whole number is wanted here")
    if number > largest:
        raise RefusedError(f"a whole number of at most {largest} is wanted here")
    return int(number)
