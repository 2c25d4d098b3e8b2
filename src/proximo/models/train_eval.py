"""Train and eval mode of whole models. Not dropout, which is switched off for good in `dropout.py`."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Generator[None]:
    """Eval mode inside; afterwards every submodule is in the mode it was in."""
    before = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, training in before:
            each.training = training
