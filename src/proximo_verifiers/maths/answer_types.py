"""The types of values that an answer can have."""

from dataclasses import dataclass
from fractions import Fraction

from proximo_verifiers.maths.rational_functions import NotEvaluatedError, RationalFunction, UnreadableError


@dataclass(frozen=True, slots=True)
class Infinity:
    """An infinite end of an interval, with its sign."""

    sign: int


@dataclass(frozen=True, slots=True)
class Several:
    """Several items: in brackets a tuple, vector or interval, in braces a set, without either an unordered list."""

    opening: str
    items: "tuple[Value, ...]"
    closing: str
    is_interval: bool = False
    """True if it came from an inequality, so that it is certainly an interval; (1, 5) may also be a point."""

    @property
    def ordered(self) -> bool:
        """True if the order of the items matters."""
        return self.opening not in ("", "{")


@dataclass(frozen=True, slots=True)
class Union:
    """A union of intervals or sets."""

    parts: "tuple[Value, ...]"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix as rows of entries."""

    rows: "tuple[tuple[Value, ...], ...]"


@dataclass(frozen=True, slots=True)
class Equation:
    """An equation. `name` is set if the left side is a single letter."""

    name: str | None
    left: "Value"
    right: "Value"


Value = RationalFunction | Infinity | Several | Union | Matrix | Equation


def repeating(text: str) -> Fraction:
    """The value of a repeating decimal such as 0.1\\overline{6} = 1/6.

    A period p of n digits is worth p / (10^n - 1), shifted behind the fixed digits.
    """
    digits, _, period = text.rstrip("}").partition("\\overline")
    period = period.strip().lstrip("{")
    whole, _, fixed = digits.partition(".")
    start = Fraction(int(whole + fixed or "0"), 10 ** len(fixed))
    return start + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))


def whole_number(value: RationalFunction, largest: int) -> int:
    """The value as an integer from 0 to `largest`.

    Raises UnreadableError if it is not such an integer, NotEvaluatedError if it is larger.
    """
    number = value.constant()
    if number is None or number.denominator != 1 or number < 0:
        raise UnreadableError("an expression where a whole number is needed")
    if number > largest:
        raise NotEvaluatedError(f"a whole number above {largest}")
    return int(number)
