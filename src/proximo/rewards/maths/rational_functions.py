"""Exact numbers with letters in them: quotients of polynomials over the rationals. Not how they are written.

Every value is a quotient of two polynomials in letters and in square roots of whole numbers. Equality is then decided,
yes or no: square roots of different square-free numbers are linearly independent over the rationals, and letters (pi
among them) are independent of everything. What a model wrote decides how much there is to compute, so every size is
looked at before the number is built.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, isqrt

MAX_BITS = 4096
"""Of a numerator or denominator."""
MAX_WORK = 10_000
"""Products of two terms in all the arithmetic of one answer; those of large numbers count several times."""
MAX_RADICAND = 10**12
"""Above it only perfect powers have a root here; the rest is left to others."""
MAX_DEGREE = 10_000
ROOT_WORK = 100
"""What a root costs, in products of terms."""

Monomial = tuple[int, tuple[tuple[str, int], ...]]
"""The square-free number under the root (negative for imaginary roots), and letters with their exponents, sorted."""
Polynomial = dict[Monomial, Fraction]
"""Coefficients by monomial; no coefficient is 0."""

UNIT: Monomial = (1, ())


class UnreadableError(ValueError):
    """Outside what is read here. Somebody else may read it."""


class RefusedError(ValueError):
    """Undefined, or larger than anybody should compute: no correct answer looks like this."""


@dataclass(frozen=True, slots=True)
class Quotient:
    """`top / bottom`; `bottom` is never 0."""

    top: Polynomial
    bottom: Polynomial

    def constant(self) -> Fraction | None:
        """Its value where it is a rational number."""
        if self.bottom != ONE or not self.top.keys() <= {UNIT}:
            return None
        return self.top.get(UNIT, Fraction(0))


ONE: Polynomial = {UNIT: Fraction(1)}


def rational(value: Fraction | int) -> Quotient:
    """A rational number."""
    return Quotient({UNIT: Fraction(value)} if value else {}, ONE)


def letter(name: str) -> Quotient:
    """A letter, or anything else that is nothing but itself."""
    return Quotient({(1, ((name, 1),)): Fraction(1)}, ONE)


class Arithmetic:
    """Bounded arithmetic: raises RefusedError where a value, or all work together, grows too large."""

    def __init__(self, work: int = MAX_WORK) -> None:
        self._left = work

    def equal(self, one: Quotient, other: Quotient) -> bool:
        """Whether both are the same value."""
        if one.bottom == other.bottom:
            return one.top == other.top
        return self._product(one.top, other.bottom) == self._product(other.top, one.bottom)

    def add(self, one: Quotient, other: Quotient) -> Quotient:
        """The sum."""
        if one.bottom == other.bottom:
            return Quotient(self._sum(one.top, other.top), one.bottom)
        tops = self._product(one.top, other.bottom), self._product(other.top, one.bottom)
        return _reduced(self._sum(*tops), self._product(one.bottom, other.bottom))

    def multiply(self, one: Quotient, other: Quotient) -> Quotient:
        """The product."""
        return _reduced(self._product(one.top, other.top), self._product(one.bottom, other.bottom))

    def negate(self, value: Quotient) -> Quotient:
        """The same with the other sign."""
        return Quotient({key: -factor for key, factor in value.top.items()}, value.bottom)

    def divide(self, one: Quotient, other: Quotient) -> Quotient:
        """The quotient; dividing by 0 is refused."""
        if not other.top:
            raise RefusedError("a division by 0")
        return self.multiply(one, _reduced(other.bottom, other.top))

    def power(self, base: Quotient, exponent: Quotient) -> Quotient:
        """`base` to a whole power, or to a power of halves."""
        value = exponent.constant()
        if value is None:
            raise UnreadableError("an exponent that is no number")
        if value.denominator == 2:
            base, value = self.root(base, 2), value * 2
        if value.denominator != 1:
            raise UnreadableError("a fractional exponent")
        if value < 0:
            base = self.divide(rational(1), base)
        count = abs(value.numerator)
        if not count and not base.top:
            raise RefusedError("0 to the power of 0")
        self._room_for(base, count)
        return _reduced(self._raised(base.top, count), self._raised(base.bottom, count))

    def root(self, value: Quotient, degree: int) -> Quotient:
        """The real root of a rational number, or the principal square root of a negative one."""
        inside = value.constant()
        if inside is None:
            raise UnreadableError("a root of something that is no rational number")
        if not inside:
            return value
        self._left -= ROOT_WORK
        # The root of n/d is that of n d^(degree - 1), over d.
        if not 2 <= degree <= 8:
            raise UnreadableError(f"a root of degree {degree}")
        whole = inside.numerator * inside.denominator ** (degree - 1)
        outside, radicand = _square_root(whole) if degree == 2 else (_perfect_root(whole, degree), 1)
        return Quotient({(radicand, ()): Fraction(outside, inside.denominator)}, ONE)

    def _room_for(self, base: Quotient, count: int) -> None:
        """Looks, before a power is built, whether it stays within the bounds."""
        for polynomial in (base.top, base.bottom):
            if _bits(polynomial.values()) * count > MAX_BITS and any(abs(each) != 1 for each in polynomial.values()):
                raise RefusedError("a power that is too large")
            if max((_degree(key) for key in polynomial), default=0) * count > MAX_DEGREE:
                raise RefusedError("a power of too high a degree")

    def _raised(self, base: Polynomial, count: int) -> Polynomial:
        found = ONE
        while count:
            if count & 1:
                found = self._product(found, base)
            count >>= 1
            if count:
                base = self._product(base, base)
        return found

    def _sum(self, one: Polynomial, other: Polynomial) -> Polynomial:
        self._spend(len(other), one, other)
        found = dict(one)
        for key, factor in other.items():
            _accumulate(found, key, factor)
        return found

    def _product(self, one: Polynomial, other: Polynomial) -> Polynomial:
        if one is ONE or other is ONE:
            return other if one is ONE else one
        self._spend(len(one) * len(other), one, other)
        found: Polynomial = {}
        for left, left_factor in one.items():
            for right, right_factor in other.items():
                sign, key = _together(left, right)
                _accumulate(found, key, left_factor * right_factor * sign)
        return found

    def _spend(self, products: int, one: Polynomial, other: Polynomial) -> None:
        bits = max(_bits(one.values()), _bits(other.values()))
        self._left -= products * (1 + bits // 256)
        if bits > MAX_BITS or self._left < 0:
            raise RefusedError("more arithmetic than an answer is worth")


def _reduced(top: Polynomial, bottom: Polynomial) -> Quotient:
    """A number below the line divides what is above it, so that most values have 1 there."""
    if bottom is not ONE and bottom.keys() == {UNIT}:
        divisor = bottom[UNIT]
        return Quotient({key: factor / divisor for key, factor in top.items()}, ONE)
    return Quotient(top, bottom)


def _accumulate(into: Polynomial, key: Monomial, factor: Fraction) -> None:
    total = into.get(key, 0) + factor
    if total:
        into[key] = Fraction(total)
    else:
        into.pop(key, None)


def _together(one: Monomial, other: Monomial) -> tuple[int, Monomial]:
    """The product of two monomials: a whole factor, which the roots may give, and a monomial."""
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
    return max((max(each.numerator.bit_length(), each.denominator.bit_length()) for each in factors), default=0)


def _square_root(whole: int) -> tuple[int, int]:
    """(a, b) with b square-free and sqrt(whole) = a sqrt(b)."""
    rest, sign = abs(whole), 1 if whole > 0 else -1
    if isqrt(rest) ** 2 == rest:
        return isqrt(rest), sign
    if rest > MAX_RADICAND:
        raise UnreadableError("a root of a large number")
    outside, squarefree, divisor = 1, 1, 2
    # Below the cube root of what is left there may be any divisors; above it, two primes at most.
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
    """`rest` is square-free here, but may share a prime with what was taken out before."""
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
        raise UnreadableError("a root that is not whole")
    return low if whole > 0 else -low
