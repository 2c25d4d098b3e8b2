"""torch.compile around the layers of a model that trains. Not the attention, which is left out of it."""

import os
import shutil
from typing import Any

import torch
from torch import nn

from proximo.errors import ConfigError
from proximo.models.attention.packed import register_attention


def check_compiler(backend: str, device: torch.device) -> None:
    """Raises ConfigError where inductor has no C++ compiler for the CPU; loads nothing."""
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name]
    if backend == "inductor" and device.type == "cpu" and not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"run.compile inductor compiles C++ for the CPU, and none of {', '.join(names)} is installed: install g++, "
            "or set run.compile: none"
        )


def compile_layers(layers: nn.Module, backend: str) -> Any:
    """A compiled view of `layers`: same weights, same names, with shapes left open.

    Who attends to whom differs with every micro-batch, so that compiled attention would be compiled anew each time:
    it is called as it is, between the compiled parts.
    """
    register_attention(compiled=False)
    return torch.compile(layers, backend=backend, dynamic=True)
