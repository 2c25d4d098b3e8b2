"""What the outputs of a value model mean in the units of the returns, and how that follows the returns.

Pure functions of numbers, but for the two conversions. The caller keeps moments and units, and rescales the model.

A value is scale * output + shift. The scale follows the standard deviation of the returns, so that the value model
learns numbers of about one size, whatever the rewards are. When it moves, the model's last layer is multiplied by old
scale / new scale, so that no value changes (PopArt, arXiv:1602.07714). PopArt moves the mean in the same way, by
the bias of that layer; since the values stay, the difference of value and return, which is all that a loss reads, does
not depend on that mean. A head without a bias therefore loses nothing by a shift that stays, and here it stays: at
the mean of the first returns for a model that claims nothing yet (all outputs 0), at 0 for any other.
"""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

SMALLEST_SCALE = 0.1
"""Returns that hardly differ are not blown up beyond this, as in AReaL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnMoments:
    """Mean and biased variance of the returns seen so far, and the weight that they have against the next ones."""

    weight: float = 0.0
    mean: float = 0.0
    variance: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueUnits:
    """value = scale * output + shift."""

    scale: float = 1.0
    shift: float = 0.0

    def to_values(self, outputs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """What the model's outputs mean, in units of the return."""
        return outputs * self.scale + self.shift

    def to_outputs(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """What the model should say for values or returns: the inverse of `to_values`."""
        return (values - self.shift) / self.scale


def cumulative_moments(moments: ReturnMoments, *, mean: float, variance: float, count: int) -> ReturnMoments:
    """With a batch of `count` returns of this mean and biased variance added: every return weighs the same."""
    return _merged(moments, kept=moments.weight, added=float(count), mean=mean, variance=variance)


def exponential_moments(moments: ReturnMoments, *, mean: float, variance: float, decay: float) -> ReturnMoments:
    """With a batch added, while what was before weighs `decay` as much as it did; every batch counts the same.

    Mean and mean square are the debiased exponential averages of those of the batches.
    """
    return _merged(moments, kept=decay * moments.weight, added=1 - decay, mean=mean, variance=variance)


def updated_scale(units: ValueUnits, moments: ReturnMoments, *, is_first: bool) -> ValueUnits:
    """The units under new moments. `is_first`: the moments are the first, and the model's outputs are all 0."""
    scale = max(math.sqrt(moments.variance), SMALLEST_SCALE)
    return ValueUnits(scale=scale, shift=moments.mean if is_first else units.shift)


def _merged(moments: ReturnMoments, *, kept: float, added: float, mean: float, variance: float) -> ReturnMoments:
    """Of the union of two weighted sets; deviations from the common mean, so that no large squares cancel."""
    weight = kept + added
    if weight == 0:
        return moments
    new_mean = moments.mean + (mean - moments.mean) * (added / weight)
    before = moments.variance + (moments.mean - new_mean) ** 2
    batch = variance + (mean - new_mean) ** 2
    return ReturnMoments(weight=weight, mean=new_mean, variance=(kept * before + added * batch) / weight)
