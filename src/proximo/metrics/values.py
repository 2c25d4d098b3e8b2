"""Typed metric values, each with its own reduction.

A value combines with another of its type, so that the mean over micro-batches is the mean over all their tokens and
not a mean of means. An empty value has `value` None, which is not the same as 0.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self


class MetricValue(Protocol):
    """The interface of all metric values."""

    @property
    def value(self) -> float | None:
        """The reduced number; None for an empty value."""
        ...

    def combine(self, other: Self) -> Self:
        """The value over the data of both; `other` is the newer one."""
        ...


@dataclass(frozen=True, slots=True)
class Mean:
    """total / count. The count is what the mean is over: tokens, responses, updates, or seconds for a rate."""

    total: float
    count: float

    def __post_init__(self) -> None:
        _check_count(self.count)

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """The mean of `values`."""
        numbers = list(values)
        return cls(sum(numbers), len(numbers))

    @property
    def value(self) -> float | None:
        return None if self.count == 0 else self.total / self.count

    def combine(self, other: Self) -> Self:
        return type(self)(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class ExponentialMean(Mean):
    """exp(total / count), for example perplexity from nats and tokens.

    Totals and counts are combined before the exponential.
    """

    @property
    def value(self) -> float | None:
        if self.count == 0:
            return None
        exponent = self.total / self.count
        return math.inf if exponent > 700 else math.exp(exponent)


@dataclass(frozen=True, slots=True)
class Deviation:
    """The biased standard deviation over all values: 0 for one value, None for none.

    `squares` is the sum of squared distances from `mean`. Parts combine by the parallel formula of Chan, Golub and
    LeVeque (1979), which stays precise if the mean is much larger than the deviation.
    """

    count: float
    mean: float
    squares: float

    def __post_init__(self) -> None:
        _check_count(self.count)

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """The standard deviation of `values`."""
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
    """A total over the step, for example of seconds or skipped updates. An empty sum is 0."""

    total: float = 0

    @property
    def value(self) -> float | None:
        return self.total

    def combine(self, other: Self) -> Self:
        return type(self)(self.total + other.total)


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value; None for no values. NaN if any value is NaN."""

    value: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """The largest of `values`."""
        numbers = list(values)
        return cls(math.nan if any(map(math.isnan, numbers)) else max(numbers, default=None))

    def combine(self, other: Self) -> Self:
        return type(self).of(part for part in (self.value, other.value) if part is not None)


@dataclass(frozen=True, slots=True)
class Quantile:
    """The smallest value that at least a fraction `share` of the values does not exceed. 0.5 gives the lower median."""

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
    """The newest value, for example a learning rate, a counter or a figure that is computed once per step."""

    value: float | None = None

    def combine(self, other: Self) -> Self:
        return self if other.value is None else other


def _check_count(count: float) -> None:
    if not (math.isfinite(count) and count >= 0):
        raise ValueError(f"the count of a metric value must be zero or more and finite, not {count}")
