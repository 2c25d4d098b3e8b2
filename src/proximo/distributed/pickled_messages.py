"""Pickles values for the other ranks of a run, which trust each other. Tensors arrive on the CPU."""

import io
import pickle
from typing import Any

from torch import Tensor


class _Pickler(pickle.Pickler):
    """Moves tensors to the CPU: the receiver would put one of an accelerator on the sender's device."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and (value.device.type != "cpu" or value.requires_grad):
            return _same, (value.detach().cpu(),)
        return NotImplemented


def encode(value: Any) -> bytes:
    """The message of a value. Raises what pickle raises for a value that cannot be sent."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def decode(message: bytes) -> Any:
    """The value of a message that a rank of this run encoded."""
    return pickle.loads(message)  # noqa: S301 - of this run's own ranks


def _same(value: Tensor) -> Tensor:
    return value
