"""The types of values that an answer can have, and the values of chains: 5 for `2 + 3 = 5`, an interval for `x < 5`."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from proximo_verifiers.maths.rational_functions import (
    Arithmetic,
    NotEvaluatedError,
    RationalFunction,
    UnreadableError,
    letter,
)

RELATIONS = ("<", ">", "\\le", "\\ge")


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


def chain_value(name: str | None, sides: Sequence[Value], arithmetic: Arithmetic) -> Value:
    """The value of `name = side = side`, or of `side = side` without a name. A single side is its own value.

    After a name, formulas may precede the value (`A = lw = 12`). A side that differs from the last one, and has no
    letters that the last one lacks, makes the chain an equation in these letters. Raises NotEvaluatedError if sides
    that are numbers differ, UnreadableError for other chains.
    """
    last = sides[-1]
    if len(sides) > 1:
        chain = [side for side in sides if isinstance(side, RationalFunction)]
        if len(chain) < len(sides):
            raise UnreadableError("an equation of something that is not a number")
        numbers = [side for side in chain if not _letters(side)]
        if any(not arithmetic.equal(numbers[0], other) for other in numbers[1:]):
            raise NotEvaluatedError("a false equation")
        if name is None and len(numbers) < len(chain):
            if len(chain) > 2:
                raise UnreadableError("several equations in one")
            return Equation(None, *chain)
        for side in chain[:-1]:
            if _letters(side) <= _letters(chain[-1]) and not arithmetic.equal(side, chain[-1]):
                return Equation(None, side, last)
    return last if name is None else Equation(name, letter(name), last)


def inequality_interval(sides: Sequence[Value], relations: Sequence[str]) -> Equation:
    """The letter of `x > 5`, `5 < x` or `1 < x \\le 5`, with its interval. Raises UnreadableError for anything else."""
    if all(relation in (">", "\\ge") for relation in relations):
        sides, relations = sides[::-1], ["<" if relation == ">" else "\\le" for relation in reversed(relations)]
    if not all(relation in ("<", "\\le") for relation in relations):
        raise UnreadableError("inequalities in both directions")
    names = [_name(side) for side in sides]
    if len(sides) == 2:
        below = names[1] is not None
        sides = [*sides, Infinity(1)] if below else [Infinity(-1), *sides]
        names = [*names, None] if below else [None, *names]
        relations = [*relations, "<"] if below else ["<", *relations]
    lowest, _, highest = sides if len(sides) == 3 else (None, None, None)
    name = names[1] if len(names) == 3 else None
    if lowest is None or highest is None or name is None or not (_is_bound(lowest) and _is_bound(highest)):
        raise UnreadableError("an inequality that does not bound one letter")
    brackets = "(" if relations[0] == "<" else "[", ")" if relations[1] == "<" else "]"
    return Equation(name, letter(name), Several(brackets[0], (lowest, highest), brackets[1], True))


def union_of(parts: Sequence[Value]) -> Value:
    """The union of intervals or sets. Inequalities in one letter become an equation of the letter with the union."""
    if not all(isinstance(part, Equation) for part in parts):
        return Union(tuple(parts))
    names = {part.name for part in parts if isinstance(part, Equation)}
    name = names.pop()
    if names or name is None:
        raise UnreadableError("a union of equations")
    return Equation(name, letter(name), Union(tuple(part.right for part in parts if isinstance(part, Equation))))


def _name(side: Value) -> str | None:
    """The name of the letter if the side is a single letter, else None."""
    names = _letters(side) if isinstance(side, RationalFunction) else set()
    return next((name for name in names if len(names) == 1 and side == letter(name)), None)


def _is_bound(side: Value) -> bool:
    return isinstance(side, Infinity) or (isinstance(side, RationalFunction) and not _letters(side))


def _letters(value: RationalFunction) -> set[str]:
    """The letters of a value, without pi, which is a number."""
    return {name for part in (value.top, value.bottom) for _, powers in part for name, _ in powers} - {"\\pi"}
