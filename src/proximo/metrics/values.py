"""Typed metric values, each of which owns its reduction. Not the recording of them, and no tensors.

A value knows how it joins another of its kind, so that a mean over micro-batches is the mean over all their tokens
and never a mean of means. A value that saw nothing has no number (`value` is None), which is not the same as zero.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, Self


class MetricValue(Protocol):
    """What every kind of value offers."""

    @property
    def value(self) -> float | None:
        """The number, or None where nothing was seen."""
        ...

    def combine(self, other: Self) -> Self:
        """What both saw together; `other` is the newer one."""
        ...


@dataclass(frozen=True, slots=True)
class Mean:
    """total / count. The count is what the mean is over: tokens, responses, updates, or seconds for a rate."""

    total: float
    count: float

    def __post_init__(self) -> None:
        _refuse_bad_count(self.count)

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """The mean over the given numbers, each counted once."""
        numbers = list(values)
        return cls(sum(numbers), len(numbers))

    @property
    def value(self) -> float | None:
        return None if self.count == 0 else self.total / self.count

    def combine(self, other: Self) -> Self:
        return type(self)(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class ExponentialMean:
    """exp(total / count): perplexity, from nats and tokens. Joined before the exponential, as it must be."""

    total: float
    count: float

    def __post_init__(self) -> None:
        _refuse_bad_count(self.count)

    @property
    def value(self) -> float | None:
        if self.count == 0:
            return None
        exponent = self.total / self.count
        return math.inf if exponent > 700 else math.exp(exponent)

    def combine(self, other: Self) -> Self:
        return type(self)(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Deviation:
    """The standard deviation over all values seen (divided by their number): one value gives 0, none gives None.

    `squares` is the sum of squared distances from `mean`; two parts join by the parallel formula of Chan, Golub and
    LeVeque (1979), which loses no digits where the mean is large beside the deviation.
    """

    count: float
    mean: float
    squares: float

    def __post_init__(self) -> None:
        _refuse_bad_count(self.count)

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """The deviation of the given numbers."""
        numbers = list(values)
        if not numbers:
            return cls(0, 0.0, 0.0)
        mean = sum(numbers) / len(numbers)
        return cls(len(numbers), mean, sum((number - mean) * (number - mean) for number in numbers))

    @property
    def value(self) -> float | None:
        return None if self.count == 0 else math.sqrt(self.squares / self.count)

    def combine(self, other: Self) -> Self:
        count = self.count + other.count
        if count == 0:
            return self
        distance = other.mean - self.mean
        squares = self.squares + other.squares + distance * distance * self.count * other.count / count
        return type(self)(count, self.mean + distance * other.count / count, squares)


@dataclass(frozen=True, slots=True)
class Sum:
    """A total over the step: seconds, skipped updates, faults. Nothing counted is 0."""

    total: float = 0

    @property
    def value(self) -> float | None:
        return self.total

    def combine(self, other: Self) -> Self:
        return type(self)(self.total + other.total)


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value seen; None before the first. A NaN stays, whichever side it came from."""

    value: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """The largest of the given numbers."""
        return cls(_extreme(list(values), max))

    def combine(self, other: Self) -> Self:
        return type(self).of(part for part in (self.value, other.value) if part is not None)


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest value seen; None before the first. A NaN stays, whichever side it came from."""

    value: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """The smallest of the given numbers."""
        return cls(_extreme(list(values), min))

    def combine(self, other: Self) -> Self:
        return type(self).of(part for part in (self.value, other.value) if part is not None)


@dataclass(frozen=True, slots=True)
class Quantile:
    """The smallest value seen that at least `share` of them do not exceed: 0.5 is the median, 1 the maximum."""

    share: float
    values: tuple[float, ...] = ()

    @property
    def value(self) -> float | None:
        if not self.values:
            return None
        return sorted(self.values)[max(0, math.ceil(self.share * len(self.values)) - 1)]

    def combine(self, other: Self) -> Self:
        return type(self)(self.share, self.values + other.values)


@dataclass(frozen=True, slots=True)
class Last:
    """The newest value: a learning rate, a counter, a figure computed once for the whole step."""

    value: float | None = None

    def combine(self, other: Self) -> Self:
        return self if other.value is None else other


def combine(first: MetricValue, second: MetricValue) -> MetricValue:
    """What both saw together; `second` is the newer one. Values of two kinds do not join: TypeError."""
    if type(first) is not type(second):
        raise TypeError(f"a {type(first).__name__} was to be combined with a {type(second).__name__}")
    return first.combine(second)


def _refuse_bad_count(count: float) -> None:
    if not (math.isfinite(count) and count >= 0):
        raise ValueError(f"the count of a metric value must be zero or more and finite, not {count}")


def _extreme(numbers: list[float], choose: Callable[[list[float]], float]) -> float | None:
    if any(math.isnan(number) for number in numbers):
        return math.nan
    return choose(numbers) if numbers else None
