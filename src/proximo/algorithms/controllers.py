"""Controllers of the KL coefficient: the adaptive one as a function, and two objects that keep the coefficient.

The objects are for your own loops; the trainer keeps its coefficient in the state that its checkpoints save.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

KLValues = Sequence[float] | Tensor
"""One number for each sequence: nats, the sum over its tokens of k1, policy from reference."""


class KLController(Protocol):
    """Keeps a KL coefficient: one of the two classes below, or your own object."""

    coefficient: float
    """Reward per nat, at least 0."""

    def update(self, kl_values: KLValues) -> float:
        """The next coefficient, from the KL of each sequence since the last update."""
        ...


def adaptive_kl(coefficient: float, *, observed: float, target: float, horizon: float, num_sequences: int) -> float:
    """coefficient * (1 + error * num_sequences / horizon), error = clip(observed / target - 1, -0.2, 0.2).

    Source: arXiv:1909.08593, section 2.2.

    Args:
        coefficient: reward per nat, now.
        observed: nats: the mean over sequences of the sum over tokens of k1, policy from reference. Other measures of
            KL do not fit a target that is meant for this one.
        target: nats, above 0.
        horizon: sequences over which the coefficient may change by its 20 percent.
        num_sequences: how many sequences `observed` is the mean of; with 0 nothing was observed and nothing changes.

    Returns:
        The next coefficient, never below 0.

    Raises:
        ValueError: `observed` is not a number.
    """
    if num_sequences == 0:
        return coefficient
    if math.isnan(observed):
        raise ValueError(
            f"the adaptive KL coefficient needs an observed KL that is a number; got nan over {num_sequences} "
            "sequences: look for log-probs that are not finite"
        )
    error = min(max(observed / target - 1, -0.2), 0.2)
    return max(coefficient * (1 + error * num_sequences / horizon), 0.0)


class ConstantKLController:
    """A constant KL coefficient, written to `model.kl_coef` if a model is given."""

    def __init__(self, coefficient: float, *, model: Any = None) -> None:
        """`model`: anything with an attribute `kl_coef`, written now and at every update.

        Raises ValueError for a coefficient that is not a number of at least 0, AttributeError for a model without
        `kl_coef`.
        """
        self._model = model
        self.coefficient = _write(_checked(coefficient, "coefficient", zero=True), model)

    def update(self, kl_values: KLValues) -> float:
        """The coefficient, which never changes."""
        del kl_values
        return _write(self.coefficient, self._model)


class AdaptiveKLController:
    """A KL coefficient that is adapted so that sequences keep a KL of `target` (`adaptive_kl`).

    It reads the KL itself, not rewards that contain the coefficient, so it divides by nothing and a coefficient of 0
    works. The horizon counts sequences, not batches.
    """

    def __init__(self, coefficient: float, *, target: float, horizon: float, model: Any = None) -> None:
        """`target` in nats per sequence, `horizon` in sequences; `model` as for the constant one, and its errors."""
        self.target = _checked(target, "target", zero=False)
        self.horizon = _checked(horizon, "horizon", zero=False)
        self._model = model
        self.coefficient = _write(_checked(coefficient, "coefficient", zero=True), model)

    def update(self, kl_values: KLValues) -> float:
        """The next coefficient, from the KL of each sequence since the last update; unchanged without sequences.

        Raises ValueError where one is not a number, with the coefficient as it was.
        """
        try:
            observed = [float(value) for value in kl_values]
        except TypeError as error:
            raise ValueError(f"update wants the KL of each sequence in a list, got {kl_values!r:.60}") from error
        self.coefficient = adaptive_kl(
            self.coefficient,
            observed=sum(observed) / len(observed) if observed else 0.0,
            target=self.target,
            horizon=self.horizon,
            num_sequences=len(observed),
        )
        return _write(self.coefficient, self._model)


def _checked(number: float, name: str, *, zero: bool) -> float:
    wanted = "of at least 0" if zero else "above 0"
    if not isinstance(number, int | float) or not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise ValueError(f"the {name} must be a number {wanted}, got {number!r}")
    return float(number)


def _write(coefficient: float, model: Any) -> float:
    if model is not None:
        if not hasattr(model, "kl_coef"):
            raise AttributeError(
                f"the model of a KL controller must have an attribute kl_coef to write to, {type(model).__name__} has "
                "none: give it one, or leave model out and read the controller's coefficient"
            )
        model.kl_coef = coefficient
    return coefficient
