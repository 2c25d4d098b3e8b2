"""Decides exactly whether two answers are equal, where both can be parsed. Others are left to symbols.py.

An ambiguous text may have several values: with its last word as a unit or not, 1,000 as one number or as two. Two
answers are equal if any value of one equals any value of the other.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import isqrt

from proximo_verifiers.maths.answer_types import Equation, Infinity, Matrix, Several, Union, Value
from proximo_verifiers.maths.cleaning import MAX_CHARACTERS, clean
from proximo_verifiers.maths.grammar import Parser
from proximo_verifiers.maths.lexer import Token, has_groups, tokens_of
from proximo_verifiers.maths.rational_functions import (
    Arithmetic,
    NotEvaluatedError,
    Polynomial,
    RationalFunction,
    UnreadableError,
    rational,
)
from proximo_verifiers.maths.units import as_mixed_number, chosen_letter, in_figures, without_unit, words_of

MAX_ITEMS = 50
"""Largest number of items of sets and lists that are compared in every order."""
DIGITS = 10**30
"""Precision of roots and pi when a tolerance allows an approximation: 30 decimal places."""
PI = Fraction(3141592653589793238462643383279, DIGITS)
_SPACE = re.compile(r"(?<!\d) | (?!\d)", re.ASCII)
_WRAPPER = re.compile(r"\\(?:boxed|fbox|displaystyle|textstyle)(?![A-Za-z])")
"""What cleaning drops, and the braces around its argument stay."""


def equivalent(reference: str, answer: str, *, relative_tolerance: float | None = None) -> bool | None:
    """Whether the answers are equal; None if that is uncertain, because one of them is outside the grammar.

    With `relative_tolerance` real numbers may differ by this fraction of the reference. Raises NotEvaluatedError for an
    answer that is undefined or too large to compute.
    """
    if len(answer) > MAX_CHARACTERS:
        raise NotEvaluatedError(f"an answer of more than {MAX_CHARACTERS} characters")
    reference, answer = in_figures(reference), in_figures(answer)
    if (same := _same_text(reference, answer)) is not None:
        return same
    percent = "%" not in reference or "%" not in answer
    references, answers = candidate_parses(reference, percent=percent), candidate_parses(answer, percent=percent)
    if not references.values:
        return None
    if not answers.values and words_of(answer) is not None:
        return False
    if not answers.values and answers.refused:
        raise NotEvaluatedError(answers.refused)
    comparison = AnswerComparison(relative_tolerance)
    results = {comparison.same(one, other) for one in references.values for other in answers.values}
    return True if True in results else None if None in results or not results else False


def _same_text(reference: str, answer: str) -> bool | None:
    """Compares the answers as texts and as words; None if that does not decide. Symmetric in its arguments."""
    if _written(reference) == _written(answer):
        return True
    results = {_same_words(reference, answer), _same_words(answer, reference)}
    return True if True in results else False if False in results else None


def _same_words(one: str, other: str) -> bool | None:
    """Whether `other` is the same words or choice as `one`; None if `one` is neither words nor the letter of a
    choice."""
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
    """The cleaned text without spaces, except between digits, since 1 1/2 is not 11/2."""
    return _SPACE.sub("", clean(text))


class AnswerComparison:
    """Compares values of an answer with values of its reference. One budget bounds all comparisons."""

    def __init__(self, relative_tolerance: float | None) -> None:
        self._tolerance = None if relative_tolerance is None else Fraction(relative_tolerance)
        self._arithmetic = Arithmetic()

    def same(self, one: Value, other: Value) -> bool | None:
        """Whether the reference `one` equals `other`; None if that is uncertain."""
        match one, other:
            case Equation(), Equation():
                return self._same_equation(one, other)
            case (Equation(name=str(), right=value), rest) | (rest, Equation(name=str(), right=value)):
                return self.same(value, rest)
            case (Several(items=(value,)), RationalFunction() as rest) | (
                RationalFunction() as rest,
                Several(items=(value,)),
            ):
                return self.same(value, rest)
            case (RationalFunction() | Infinity(), RationalFunction() | Infinity()):
                return self._same_number(one, other)
            case (Matrix() as matrix, Several(opening="(") as rest) | (
                Several(opening="(") as rest,
                Matrix() as matrix,
            ):
                return rest.closing == ")" and self._same_vector(matrix, rest)
        return self._same_collection(one, other)

    def _same_number(self, one: RationalFunction | Infinity, other: RationalFunction | Infinity) -> bool:
        if isinstance(one, RationalFunction) and isinstance(other, RationalFunction):
            return self._arithmetic.equal(one, other) or self._close(one, other)
        return one == other

    def _same_collection(self, one: Value, other: Value) -> bool | None:
        match one, other:
            case Several(), Several():
                return self._same_several(one, other)
            case Matrix(), Matrix():
                shapes = [[len(row) for row in matrix.rows] for matrix in (one, other)]
                entries = ([entry for row in matrix.rows for entry in row] for matrix in (one, other))
                return shapes[0] == shapes[1] and self._in_order(*entries)
            case Union(), Union():
                # Overlapping parts can be written in several ways, so unequal parts prove nothing.
                return self._in_any_order(one.parts, other.parts) or None
            case (RationalFunction() | Infinity() | Several(), RationalFunction() | Infinity() | Several()):
                return False
            case (RationalFunction(), Matrix() | Union()) | (Matrix() | Union(), RationalFunction()):
                return False
        return None

    def _same_vector(self, matrix: Matrix, vector: Several) -> bool | None:
        """Compares a matrix of one row or one column with a vector."""
        if len(matrix.rows) == 1:
            return self._in_order(matrix.rows[0], vector.items)
        return all(len(row) == 1 for row in matrix.rows) and self._in_order(
            [row[0] for row in matrix.rows], vector.items
        )

    def _same_several(self, one: Several, other: Several) -> bool | None:
        if one.ordered == other.ordered:
            if not one.ordered:
                # If one list assigns values to different letters and the other has bare values, order identifies them.
                by_order = _is_assignment(one.items) != _is_assignment(other.items)
                return (self._in_order if by_order else self._in_any_order)(one.items, other.items)
            # With two items the brackets may mean an interval, so they count; with more they only delimit a vector.
            interval = len(one.items) == 2 and (one.opening, one.closing) != (other.opening, other.closing)
            return not interval and self._in_order(one.items, other.items)
        # A list without brackets may be a tuple, but not an interval or a set.
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
        numbers = [side for side in sides if isinstance(side, RationalFunction)]
        if len(numbers) < len(sides):
            return None
        if one.name and other.name and numbers[1].constant() is not None and numbers[3].constant() is not None:
            return False
        # Equations that differ by a constant factor are equal. Others may still have the same solutions, hence None.
        minus = rational(-1)
        first, second = (
            self._arithmetic.add(left, self._arithmetic.multiply(minus, right))
            for left, right in (numbers[:2], numbers[2:])
        )
        if not first.top or not second.top:
            return True if first.top == second.top else None
        return True if self._is_constant(self._arithmetic.divide(first, second)) else None

    def _is_constant(self, value: RationalFunction) -> bool:
        """True if the function is a rational constant."""
        key = next(iter(value.top))
        if key not in value.bottom:
            return False
        factor = rational(value.top[key] / value.bottom[key])
        return self._arithmetic.equal(value, factor)

    def _close(self, one: RationalFunction, other: RationalFunction) -> bool:
        if self._tolerance is None:
            return False
        values = [_approximate(one), _approximate(other)]
        if values[0] is None or values[1] is None:
            return False
        return abs(values[0] - values[1]) <= self._tolerance * abs(values[0])


def _all(results: Iterable[bool | None]) -> bool | None:
    """The conjunction in three-valued logic, lazily."""
    seen = set()
    for result in results:
        if result is False:
            return False
        seen.add(result)
    return None if None in seen else True


def _any(results: Iterable[bool | None]) -> bool | None:
    """The disjunction in three-valued logic, lazily."""
    seen = set()
    for result in results:
        if result is True:
            return True
        seen.add(result)
    return None if None in seen else False


def _is_assignment(items: Sequence[Value]) -> bool:
    """True for values of different letters, such as `x = 1, y = 2`; false for `x_1 = 1, x_2 = 2`."""
    names = {item.name for item in items if isinstance(item, Equation) and item.name is not None}
    return len({name.partition("_")[0] for name in names}) > 1


def _approximate(value: RationalFunction) -> Fraction | None:
    """The approximate real value, or None if it has letters or an imaginary part."""
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


@dataclass(frozen=True, slots=True)
class CandidateParses:
    """The possible values of a text."""

    values: tuple[Value, ...]
    """Empty if the text is outside the grammar."""
    refused: str = ""
    """The reason for refusing to evaluate the text, if it was refused."""


@lru_cache(maxsize=1024)
def candidate_parses(text: str, *, percent: bool) -> CandidateParses:
    """Parses a text in every plausible way. With `percent`, 50% may be 0.5 or 50, otherwise it is 50."""
    arithmetic = Arithmetic()  # one budget for all candidates
    values: list[Value] = []
    has_sets = _WRAPPER.search(text) is None
    try:
        for variant in dict.fromkeys((text, as_mixed_number(text))):
            for tokens, percent_factor in _tokenisations(clean(variant), percent=percent):
                with suppress(UnreadableError):
                    values.append(_value(tokens, percent_factor, has_sets, arithmetic))
    except NotEvaluatedError as error:
        return CandidateParses(tuple(values), str(error))
    return CandidateParses(tuple(values))


def _tokenisations(cleaned: str, *, percent: bool) -> Iterator[tuple[list[Token], Fraction]]:
    """(tokens, factor of a percent sign) for each way to cut the text into tokens."""
    bare = without_unit(cleaned)
    for text in (cleaned,) if bare is None else (bare, cleaned):
        factors = (Fraction(1, 100), Fraction(1)) if percent and "%" in text else (Fraction(1),)
        for grouped in (True, False) if has_groups(text) else (False,):
            with suppress(UnreadableError):
                tokens = tokens_of(text, grouped=grouped)
                yield from ((tokens, factor) for factor in factors)


def _value(tokens: list[Token], percent: Fraction, has_sets: bool, arithmetic: Arithmetic) -> Value:
    signs = (1, -1) if any(token.text == "\\pm" for token in tokens) else (1,)
    values = [
        Parser(tokens, sign=sign, percent=percent, has_sets=has_sets, arithmetic=arithmetic).answer() for sign in signs
    ]
    return values[0] if len(values) == 1 else _both_signs(*values)


def _both_signs(plus: Value, minus: Value) -> Several:
    """Both values of a text with a plus-minus sign: as a list, or as a set if they are sets."""
    match plus, minus:
        case Several(opening=("" | "{") as opening), Several():
            return Several(opening, plus.items + minus.items, plus.closing)
        case RationalFunction(), RationalFunction():
            return Several("", (plus, minus), "")
    raise UnreadableError("an unexpected plus-minus sign")
