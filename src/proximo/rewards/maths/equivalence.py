"""Whether two answers are the same, decided exactly where both can be read. Not what they are otherwise: symbols.py."""

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from math import isqrt

from proximo.rewards.maths.answer_types import Equation, Infinity, Matrix, Several, Union, Value
from proximo.rewards.maths.candidate_parses import readings
from proximo.rewards.maths.cleaning import MAX_CHARACTERS, clean
from proximo.rewards.maths.rational_functions import Arithmetic, Polynomial, Quotient, RefusedError, rational
from proximo.rewards.maths.spelled import in_figures
from proximo.rewards.maths.units import chosen_letter, words_of

MAX_ITEMS = 50
"""Of sets and lists whose items are compared in every order."""
DIGITS = 10**30
"""Roots and pi are taken to so many places, where a tolerance allows an approximation."""
PI = Fraction(3141592653589793238462643383279, DIGITS)
_SPACE = re.compile(r"(?<!\d) | (?!\d)", re.ASCII)


def equivalent(reference: str, answer: str, *, relative_tolerance: float | None = None) -> bool | None:
    """True or False where it is certain; None where one of the two is outside the grammar.

    Raises RefusedError for an answer that is undefined or too large to compute.
    """
    if len(answer) > MAX_CHARACTERS:
        raise RefusedError(f"an answer of more than {MAX_CHARACTERS} characters")
    reference, answer = in_figures(reference), in_figures(answer)
    if (same := _same_text(reference, answer)) is not None:
        return same
    percent = "%" not in reference or "%" not in answer
    references, answers = readings(reference, percent=percent), readings(answer, percent=percent)
    if not references.values:
        return None
    if not answers.values and words_of(answer) is not None:
        return False
    if not answers.values and answers.refused:
        raise RefusedError(answers.refused)
    comparison = Comparison(relative_tolerance)
    found = {comparison.same(one, other) for one in references.values for other in answers.values}
    return True if True in found else None if None in found or not found else False


def _same_text(reference: str, answer: str) -> bool | None:
    """Equal as they are written, or words that are; None where that does not decide. Either may be the reference."""
    if _written(reference) == _written(answer):
        return True
    found = {_same_words(reference, answer), _same_words(answer, reference)}
    return True if True in found else False if False in found else None


def _same_words(one: str, other: str) -> bool | None:
    """Whether the other says the same as one; None where one is neither words nor the letter of a choice."""
    words = words_of(one)
    if words is not None:
        return chosen_letter(other) == words if len(words) == 1 else words_of(other) == words
    bare = one.strip("$ ")
    chosen = chosen_letter(other) if len(bare) == 1 and bare in "ABCDEFGHIJ" else None
    if chosen == "":
        return False
    return True if chosen == bare.lower() else None


@lru_cache(maxsize=1024)
def _written(text: str) -> str:
    """The cleaned text without spaces, but between digits: 1 1/2 is not 11/2."""
    return _SPACE.sub("", clean(text))


class Comparison:
    """Compares the values of one answer with those of its reference, with bounded work for all of it."""

    def __init__(self, relative_tolerance: float | None) -> None:
        self._tolerance = None if relative_tolerance is None else Fraction(relative_tolerance)
        self._arithmetic = Arithmetic()

    def same(self, one: Value, other: Value) -> bool | None:
        """Whether the reference `one` is `other`; None where that is not certain."""
        match one, other:
            case Equation(), Equation():
                return self._same_equation(one, other)
            case (Equation(name=str(), right=value), rest) | (rest, Equation(name=str(), right=value)):
                return self.same(value, rest)
            case (Several(items=(value,)), Quotient() as rest) | (Quotient() as rest, Several(items=(value,))):
                return self.same(value, rest)
            case (Quotient() | Infinity(), Quotient() | Infinity()):
                return self._same_number(one, other)
            case (Matrix() as matrix, Several(opening="(") as rest) | (
                Several(opening="(") as rest,
                Matrix() as matrix,
            ):
                return rest.closing == ")" and self._same_vector(matrix, rest)
        return self._same_collection(one, other)

    def _same_number(self, one: Quotient | Infinity, other: Quotient | Infinity) -> bool:
        if isinstance(one, Quotient) and isinstance(other, Quotient):
            return self._arithmetic.equal(one, other) or self._close(one, other)
        return one == other

    def _same_collection(self, one: Value, other: Value) -> bool | None:
        match one, other:
            case Several(), Several():
                return self._same_several(one, other)
            case Matrix(), Matrix():
                shapes = [[len(row) for row in each.rows] for each in (one, other)]
                entries = ([entry for row in each.rows for entry in row] for each in (one, other))
                return shapes[0] == shapes[1] and self._in_order(*entries)
            case Union(), Union():
                # Parts that overlap can be written in several ways.
                return self._in_any_order(one.parts, other.parts) or None
            case (Quotient() | Infinity() | Several(), Quotient() | Infinity() | Several()):
                return False
            case (Quotient(), Matrix() | Union()) | (Matrix() | Union(), Quotient()):
                return False
        return None

    def _same_vector(self, matrix: Matrix, vector: Several) -> bool | None:
        """A row or a column is the vector with its entries."""
        if len(matrix.rows) == 1:
            return self._in_order(matrix.rows[0], vector.items)
        return all(len(row) == 1 for row in matrix.rows) and self._in_order(
            [row[0] for row in matrix.rows], vector.items
        )

    def _same_several(self, one: Several, other: Several) -> bool | None:
        if one.ordered == other.ordered:
            if not one.ordered:
                # Without their names, values of different letters are told apart by their places alone.
                by_place = _is_assignment(one.items) != _is_assignment(other.items)
                return (self._in_order if by_place else self._in_any_order)(one.items, other.items)
            # Of two items the brackets say which ends belong to an interval; of more they only hold a vector.
            interval = len(one.items) == 2 and (one.opening, one.closing) != (other.opening, other.closing)
            return not interval and self._in_order(one.items, other.items)
        # A list without brackets stands for a tuple, and for no interval or set.
        round_ = {"", "("} == {one.opening, other.opening} and "]" not in (one.closing, other.closing)
        point = round_ and not (one.is_interval or other.is_interval)
        return point and self._in_order(one.items, other.items)

    def _in_order(self, ones: Sequence[Value], others: Sequence[Value]) -> bool | None:
        if len(ones) != len(others):
            return False
        return _all(self.same(one, other) for one, other in zip(ones, others, strict=True))

    def _in_any_order(self, ones: Sequence[Value], others: Sequence[Value]) -> bool | None:
        if max(len(ones), len(others)) > MAX_ITEMS:
            return self._in_order(ones, others) or None
        both_ways = ((ones, others), (others, ones))
        return _all(_any(self.same(one, other) for other in them) for us, them in both_ways for one in us)

    def _same_equation(self, one: Equation, other: Equation) -> bool | None:
        if one.name is not None and one.name == other.name:
            return self.same(one.right, other.right)
        sides = (one.left, one.right, other.left, other.right)
        numbers = [side for side in sides if isinstance(side, Quotient)]
        if len(numbers) < len(sides):
            return None
        if one.name and other.name and numbers[1].constant() is not None and numbers[3].constant() is not None:
            return False
        # Equations that differ by a factor are the same; those that do not may still have the same solutions.
        minus = rational(-1)
        first, second = (
            self._arithmetic.add(left, self._arithmetic.multiply(minus, right))
            for left, right in (numbers[:2], numbers[2:])
        )
        if not first.top or not second.top:
            return True if first.top == second.top else None
        return True if self._is_constant(self._arithmetic.divide(first, second)) else None

    def _is_constant(self, value: Quotient) -> bool:
        """Whether top and bottom differ by a rational factor alone."""
        key = next(iter(value.top))
        if key not in value.bottom:
            return False
        factor = rational(value.top[key] / value.bottom[key])
        return self._arithmetic.equal(value, factor)

    def _close(self, one: Quotient, other: Quotient) -> bool:
        if self._tolerance is None:
            return False
        values = [_approximate(one), _approximate(other)]
        if values[0] is None or values[1] is None:
            return False
        return abs(values[0] - values[1]) <= self._tolerance * abs(values[0])


def _all(found: Iterable[bool | None]) -> bool | None:
    results = set()
    for each in found:
        if each is False:
            return False
        results.add(each)
    return None if None in results else True


def _any(found: Iterable[bool | None]) -> bool | None:
    results = set()
    for each in found:
        if each is True:
            return True
        results.add(each)
    return None if None in results else False


def _is_assignment(items: Sequence[Value]) -> bool:
    """Whether these are values of different letters: `x = 1, y = 2`, and not `x_1 = 1, x_2 = 2`."""
    names = {item.name for item in items if isinstance(item, Equation) and item.name is not None}
    return len({name.partition("_")[0] for name in names}) > 1


def _approximate(value: Quotient) -> Fraction | None:
    """The real number that it is, or None where it has letters or an imaginary part."""
    top, bottom = _sum(value.top), _sum(value.bottom)
    return top / bottom if top is not None and bottom else None


def _sum(polynomial: Polynomial) -> Fraction | None:
    total = Fraction(0)
    for (radicand, letters), factor in polynomial.items():
        powers = dict(letters)
        exponent = powers.pop("\\pi", 0)
        if radicand < 0 or powers or exponent > 10:
            return None
        total += factor * Fraction(isqrt(radicand * DIGITS**2), DIGITS) * PI**exponent
    return total
