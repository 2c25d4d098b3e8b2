"""Keeps what the value model's outputs mean in units of the return (value_loss.normalise). Not the formulas."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from proximo.algorithms.masking import masked_mean, masked_variance
from proximo.algorithms.value_units import (
    ReturnMoments,
    ValueUnits,
    cumulative_moments,
    exponential_moments,
    followed_units,
)
from proximo.checkpoint.state import as_record
from proximo.config.ppo.options import ValueLossConfig
from proximo.metrics.values import Last, MetricValue
from proximo.models.scalar import ScalarModel


class ValueScale:
    """Owns the moments of the returns and the units that follow them, and rescales the value model's head with them.

    Without normalising the units are those of the returns themselves, and nothing is touched.
    """

    def __init__(self, model: ScalarModel, config: ValueLossConfig) -> None:
        self._model = model
        self._config = config
        self.moments = ReturnMoments()
        self.units = ValueUnits()

    @property
    def is_on(self) -> bool:
        """True where values are normalised."""
        return self._config.normalise != "none"

    def values(self, outputs: Tensor) -> Tensor:
        """What outputs of the value model mean, in units of the return; shape kept."""
        return self.units.to_values(outputs) if self.is_on else outputs

    def follow(self, values: Tensor, returns: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Take in the returns of a step; (what the model says now, what it should say), [T] each, for the loss.

        `values` and `returns` [T] are in units of the return. The head is rescaled with the units, so no value changes.
        Only a head of zeros has other values afterwards: it claims nothing, and is given the mean of the returns.
        """
        if not self.is_on or not mask.any():
            return values, returns
        is_first = self.moments.weight == 0
        self.moments = self._with_returns(returns.double(), mask)
        outputs, before = self.units.to_outputs(values), self.units
        self.units = followed_units(before, self.moments, claims_nothing=is_first and self._model.head_is_zero)
        factor = before.scale / self.units.scale
        self._model.scale_head(factor)
        return outputs * factor, self.units.to_outputs(returns)

    @property
    def metrics(self) -> dict[str, MetricValue]:
        """What the value model's outputs mean, where values are normalised."""
        return {"value/scale": Last(self.units.scale), "value/shift": Last(self.units.shift)} if self.is_on else {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the weights of the head; JSON."""
        return {"moments": asdict(self.moments), "units": asdict(self.units)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave; the head comes with the model."""
        self.moments = as_record(ReturnMoments, state["moments"])
        self.units = as_record(ValueUnits, state["units"])

    def _with_returns(self, returns: Tensor, mask: Tensor) -> ReturnMoments:
        batch = {"mean": float(masked_mean(returns, mask)), "variance": float(masked_variance(returns, mask))}
        if self._config.normalise == "cumulative":
            return cumulative_moments(self.moments, **batch, count=int(mask.sum()))
        return exponential_moments(self.moments, **batch, decay=self._config.normalise_decay)
