"""The scale and shift that convert outputs of a value model to returns, and their update from the returns (PopArt).

The caller keeps moments and units, and rescales the model.

A value is scale * output + shift. The scale follows the standard deviation of the returns, so that the value model
learns numbers of similar size for any rewards. When the scale changes, the model's last layer is multiplied by old
scale / new scale, so that no value changes (PopArt, arXiv:1602.07714). PopArt updates the mean in the same way, by
the bias of that layer. Since the values do not change, a loss of the difference between value and return does not
depend on that mean. So a constant shift costs nothing, and needs no bias in the head. It is the mean of the first
returns for a model whose outputs are still all 0, and 0 for any other model.
"""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

SMALLEST_SCALE = 0.1
"""Lower bound of the scale, so that nearly equal returns are not enlarged further, as in AReaL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnMoments:
    """Mean and biased variance of the returns so far, and their weight relative to new returns."""

    weight: float = 0.0
    mean: float = 0.0
    variance: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueUnits:
    """value = scale * output + shift."""

    scale: float = 1.0
    shift: float = 0.0

    def to_values(self, outputs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Values, in units of the return, from the model's outputs."""
        return outputs * self.scale + self.shift

    def to_outputs(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Outputs of the model for values or returns: the inverse of `to_values`."""
        return (values - self.shift) / self.scale


def cumulative_moments(moments: ReturnMoments, *, mean: float, variance: float, count: int) -> ReturnMoments:
    """The moments with a batch of `count` returns added, of this mean and biased variance. Returns count equally."""
    return _merged(moments, kept=moments.weight, added=float(count), mean=mean, variance=variance)


def exponential_moments(moments: ReturnMoments, *, mean: float, variance: float, decay: float) -> ReturnMoments:
    """The moments with a batch added, after the earlier weight is multiplied by `decay`. Every batch counts equally.

    Mean and mean square are the debiased exponential averages of those of the batches.
    """
    return _merged(moments, kept=decay * moments.weight, added=1 - decay, mean=mean, variance=variance)


def updated_scale(units: ValueUnits, moments: ReturnMoments, *, is_first: bool) -> ValueUnits:
    """The units under new moments. `is_first`: the moments are the first, and the model's outputs are all 0."""
    scale = max(math.sqrt(moments.variance), SMALLEST_SCALE)
    return ValueUnits(scale=scale, shift=moments.mean if is_first else units.shift)


def _merged(moments: ReturnMoments, *, kept: float, added: float, mean: float, variance: float) -> ReturnMoments:
    """The moments of two weighted sets, by deviations from the common mean, so that no large squares cancel."""
    weight = kept + added
    if weight == 0:
        return moments
    new_mean = moments.mean + (mean - moments.mean) * (added / weight)
    before = moments.variance + (moments.mean - new_mean) ** 2
    batch = variance + (mean - new_mean) ** 2
    return ReturnMoments(weight=weight, mean=new_mean, variance=(kept * before + added * batch) / weight)
