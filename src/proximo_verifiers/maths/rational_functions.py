"""Exact arithmetic on rational functions: quotients of polynomials with rational coefficients.

The polynomials are in letters and in square roots of integers. Equality of two values is decidable: square roots of
different square-free integers are linearly independent over the rationals, and letters (pi among them) are treated as
independent of everything. A model chooses the expressions, so the size of each result is checked before it is computed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, isqrt

MAX_BITS = 4096
"""Largest bit length of a numerator or denominator."""
MAX_WORK = 10_000
"""Budget of term products for all arithmetic of one answer. Products of large numbers count several times."""
MAX_RADICAND = 10**12
"""Above this bound only roots of perfect powers are computed; others are left to math-verify."""
MAX_DEGREE = 10_000
ROOT_WORK = 100
"""Cost of a root, in term products."""

Monomial = tuple[int, tuple[tuple[str, int], ...]]
"""(square-free integer under the root, negative for imaginary roots; sorted pairs of letter and exponent)."""
Polynomial = dict[Monomial, Fraction]
"""Coefficients by monomial; no coefficient is 0."""

UNIT: Monomial = (1, ())


class UnreadableError(ValueError):
    """The text is outside the exact grammar; math-verify may be able to parse it."""


class NotEvaluatedError(ValueError):
    """The value is undefined, or too large to compute. No correct answer looks like this."""


@dataclass(frozen=True, slots=True)
class RationalFunction:
    """The quotient `top / bottom`, where `bottom` is not 0."""

    top: Polynomial
    bottom: Polynomial

    def constant(self) -> Fraction | None:
        """The value as a rational number, or None if it is not rational."""
        if self.bottom != ONE or not self.top.keys() <= {UNIT}:
            return None
        return self.top.get(UNIT, Fraction(0))


ONE: Polynomial = {UNIT: Fraction(1)}


def rational(value: Fraction | int) -> RationalFunction:
    """The constant function with this value."""
    return RationalFunction({UNIT: Fraction(value)} if value else {}, ONE)


def letter(name: str) -> RationalFunction:
    """An opaque symbol, such as a letter."""
    return RationalFunction({(1, ((name, 1),)): Fraction(1)}, ONE)


class Arithmetic:
    """Arithmetic with a budget. Raises NotEvaluatedError if a value, or the work of all operations, grows too large."""

    def __init__(self, work: int = MAX_WORK) -> None:
        self._left = work

    def equal(self, one: RationalFunction, other: RationalFunction) -> bool:
        """True if both are the same function."""
        if one.bottom == other.bottom:
            return one.top == other.top
        return self._product(one.top, other.bottom) == self._product(other.top, one.bottom)

    def add(self, one: RationalFunction, other: RationalFunction) -> RationalFunction:
        """The sum of two functions."""
        if one.bottom == other.bottom:
            return RationalFunction(self._sum(one.top, other.top), one.bottom)
        tops = self._product(one.top, other.bottom), self._product(other.top, one.bottom)
        return _reduced(self._sum(*tops), self._product(one.bottom, other.bottom))

    def multiply(self, one: RationalFunction, other: RationalFunction) -> RationalFunction:
        """The product of two functions."""
        return _reduced(self._product(one.top, other.top), self._product(one.bottom, other.bottom))

    def negate(self, value: RationalFunction) -> RationalFunction:
        """The function with the opposite sign."""
        return RationalFunction({key: -factor for key, factor in value.top.items()}, value.bottom)

    def divide(self, one: RationalFunction, other: RationalFunction) -> RationalFunction:
        """The quotient. Raises NotEvaluatedError for a division by 0."""
        if not other.top:
            raise NotEvaluatedError("a division by 0")
        return self.multiply(one, _reduced(other.bottom, other.top))

    def power(self, base: RationalFunction, exponent: RationalFunction) -> RationalFunction:
        """`base` raised to an integer or half-integer power. Raises UnreadableError for other exponents."""
        value = exponent.constant()
        if value is None:
            raise UnreadableError("an exponent that is not a number")
        if value.denominator == 2:
            base, value = self.root(base, 2), value * 2
        if value.denominator != 1:
            raise UnreadableError("a fractional exponent")
        if value < 0:
            base = self.divide(rational(1), base)
        count = abs(value.numerator)
        if not count and not base.top:
            raise NotEvaluatedError("0 to the power of 0")
        self._room_for(base, count)
        return _reduced(self._raised(base.top, count), self._raised(base.bottom, count))

    def root(self, value: RationalFunction, degree: int) -> RationalFunction:
        """The real root of a rational number, or the principal square root of a negative one.

        Raises UnreadableError for other roots.
        """
        inside = value.constant()
        if inside is None:
            raise UnreadableError("a root of something that is not a rational number")
        if not inside:
            return value
        self._left -= ROOT_WORK
        # root(n/d) = root(n * d^(degree - 1)) / d, so that only roots of integers are needed.
        if not 2 <= degree <= 8:
            raise UnreadableError(f"a root of degree {degree}")
        whole = inside.numerator * inside.denominator ** (degree - 1)
        outside, radicand = _square_root(whole) if degree == 2 else (_perfect_root(whole, degree), 1)
        return RationalFunction({(radicand, ()): Fraction(outside, inside.denominator)}, ONE)

    def _room_for(self, base: RationalFunction, count: int) -> None:
        """Raises NotEvaluatedError if the power would exceed the bounds, before it is computed."""
        for polynomial in (base.top, base.bottom):
            if _bits(polynomial.values()) * count > MAX_BITS and any(
                abs(factor) != 1 for factor in polynomial.values()
            ):
                raise NotEvaluatedError("a power that is too large")
            if max((_degree(key) for key in polynomial), default=0) * count > MAX_DEGREE:
                raise NotEvaluatedError("a power of too high a degree")

    def _raised(self, base: Polynomial, count: int) -> Polynomial:
        # Exponentiation by squaring.
        result = ONE
        while count:
            if count & 1:
                result = self._product(result, base)
            count >>= 1
            if count:
                base = self._product(base, base)
        return result

    def _sum(self, one: Polynomial, other: Polynomial) -> Polynomial:
        self._spend(len(other), one, other)
        total = dict(one)
        for key, factor in other.items():
            _accumulate(total, key, factor)
        return total

    def _product(self, one: Polynomial, other: Polynomial) -> Polynomial:
        if one is ONE or other is ONE:
            return other if one is ONE else one
        self._spend(len(one) * len(other), one, other)
        product: Polynomial = {}
        for left, left_factor in one.items():
            for right, right_factor in other.items():
                sign, key = _together(left, right)
                _accumulate(product, key, left_factor * right_factor * sign)
        return product

    def _spend(self, products: int, one: Polynomial, other: Polynomial) -> None:
        bits = max(_bits(one.values()), _bits(other.values()))
        self._left -= products * (1 + bits // 256)
        if bits > MAX_BITS or self._left < 0:
            raise NotEvaluatedError("too much arithmetic for one answer")


def _reduced(top: Polynomial, bottom: Polynomial) -> RationalFunction:
    """Divides by a constant denominator, so that most values have the denominator 1."""
    if bottom is not ONE and bottom.keys() == {UNIT}:
        divisor = bottom[UNIT]
        return RationalFunction({key: factor / divisor for key, factor in top.items()}, ONE)
    return RationalFunction(top, bottom)


def _accumulate(into: Polynomial, key: Monomial, factor: Fraction) -> None:
    total = into.get(key, 0) + factor
    if total:
        into[key] = Fraction(total)
    else:
        into.pop(key, None)


def _together(one: Monomial, other: Monomial) -> tuple[int, Monomial]:
    """The product of two monomials as (integer factor from the roots, monomial)."""
    # sqrt(a) sqrt(b) = g sqrt(ab / g^2) with g = gcd(a, b), which is square-free again. i * i gives the sign.
    shared = gcd(one[0], other[0])
    sign = -1 if one[0] < 0 and other[0] < 0 else 1
    radicand = one[0] * other[0] // shared**2
    if not one[1] or not other[1]:
        return sign * shared, (radicand, one[1] or other[1])
    powers = dict(one[1])
    for name, count in other[1]:
        powers[name] = powers.get(name, 0) + count
    return sign * shared, (radicand, tuple(sorted(powers.items())))


def _degree(key: Monomial) -> int:
    return sum(count for _, count in key[1])


def _bits(factors: Iterable[Fraction]) -> int:
    return max((max(f.numerator.bit_length(), f.denominator.bit_length()) for f in factors), default=0)


def _square_root(whole: int) -> tuple[int, int]:
    """(a, b) with b square-free and sqrt(whole) = a sqrt(b)."""
    rest, sign = abs(whole), 1 if whole > 0 else -1
    if isqrt(rest) ** 2 == rest:
        return isqrt(rest), sign
    if rest > MAX_RADICAND:
        raise UnreadableError("a root of a large number")
    outside, squarefree, divisor = 1, 1, 2
    # Trial division up to the cube root of the rest suffices: what is left then has at most two prime factors.
    while divisor**3 <= rest:
        if rest % divisor == 0:
            rest //= divisor
            if squarefree % divisor == 0:
                outside, squarefree = outside * divisor, squarefree // divisor
            else:
                squarefree *= divisor
        else:
            divisor += 1
    if isqrt(rest) ** 2 == rest:
        return outside * isqrt(rest), sign * squarefree
    return _with_rest(outside, squarefree, rest, sign)


def _with_rest(outside: int, squarefree: int, rest: int, sign: int) -> tuple[int, int]:
    """Combines the factors. `rest` is square-free, but may share a prime with `squarefree`."""
    shared = gcd(squarefree, rest)
    return outside * shared, sign * (squarefree // shared) * (rest // shared)


def _perfect_root(whole: int, degree: int) -> int:
    if whole < 0 and degree % 2 == 0:
        raise UnreadableError("an even root of a negative number")
    low, high = 0, 1 << (abs(whole).bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= abs(whole) else (low, middle - 1)
    if low**degree != abs(whole):
        raise UnreadableError("a root that is not an integer")
    return low if whole > 0 else -low
