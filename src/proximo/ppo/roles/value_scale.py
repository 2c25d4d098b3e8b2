"""Normalisation of the value model's outputs (`value_loss.normalise`). The formulas: algorithms/value_scale.py."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from proximo.algorithms.masking import masked_mean, masked_variance
from proximo.algorithms.value_scale import (
    ReturnMoments,
    ValueUnits,
    cumulative_moments,
    exponential_moments,
    updated_scale,
)
from proximo.checkpoint.reading import as_record
from proximo.config.ppo.losses import ExponentialScaleConfig, ValueLossConfig
from proximo.metrics.values import Last, MetricValue
from proximo.models.scalar import ScalarModel


class ValueScale:
    """Holds moments of the returns and units of the value model, and rescales its head when they change (PopArt).

    Without normalising, outputs are in units of the return and nothing is rescaled.
    """

    def __init__(self, model: ScalarModel, config: ValueLossConfig) -> None:
        self._model = model
        self._config = config
        self.moments = ReturnMoments()
        self.units = ValueUnits()

    @property
    def is_on(self) -> bool:
        """Whether values are normalised."""
        return self._config.normalise is not None

    def values(self, outputs: Tensor) -> Tensor:
        """Convert outputs of the value model to units of the return. The shape is kept."""
        return self.units.to_values(outputs) if self.is_on else outputs

    def follow(self, values: Tensor, returns: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Update the units with the returns of a step. Returns (outputs, target outputs), [T] each, for the loss.

        `values` and `returns` are [T] in units of the return. The head is rescaled with the units, so that no value
        changes. The exception is an untrained head of zeros, which then predicts the mean of the returns.
        """
        if not self.is_on or not mask.any():
            return values, returns
        is_first = self.moments.weight == 0
        self.moments = self._with_returns(returns.double(), mask)
        outputs, before = self.units.to_outputs(values), self.units
        self.units = updated_scale(before, self.moments, is_first=is_first and self._model.head_is_zero)
        factor = before.scale / self.units.scale
        self._model.scale_head(factor)
        return outputs * factor, self.units.to_outputs(returns)

    @property
    def metrics(self) -> dict[str, MetricValue]:
        """Metrics of the units; empty if values are not normalised."""
        return {"value/scale": Last(self.units.scale), "value/shift": Last(self.units.shift)} if self.is_on else {}

    def state(self) -> dict[str, Any]:
        """State of the normalisation for a checkpoint, as JSON values."""
        return {"moments": asdict(self.moments), "units": asdict(self.units)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`. The head is restored with the model."""
        self.moments = as_record(ReturnMoments, state["moments"])
        self.units = as_record(ValueUnits, state["units"])

    def _with_returns(self, returns: Tensor, mask: Tensor) -> ReturnMoments:
        batch = {"mean": float(masked_mean(returns, mask)), "variance": float(masked_variance(returns, mask))}
        if isinstance(self._config.normalise, ExponentialScaleConfig):
            return exponential_moments(self.moments, **batch, decay=self._config.normalise.decay)
        return cumulative_moments(self.moments, **batch, count=int(mask.sum()))
