"""Switches models to eval mode for a while. Dropout is disabled permanently in `dropout.py`."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Generator[None]:
    """Put all submodules into eval mode inside; restore the mode of each one afterwards."""
    before = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in before:
            submodule.training = training
