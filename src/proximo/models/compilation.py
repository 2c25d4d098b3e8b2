"""Compiles the layers of trained models with torch.compile, except for attention."""

import os
import shutil
from typing import Any

import torch
from torch import nn

from proximo.errors import ConfigError
from proximo.models.attention.packed import register_attention


def check_compiler(backend: str, device: torch.device) -> None:
    """Raises ConfigError if inductor would find no C++ compiler for the CPU."""
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name]
    if backend == "inductor" and device.type == "cpu" and not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"run.compile inductor compiles C++ for the CPU, and none of {', '.join(names)} is installed: install g++, "
            "or set run.compile: none"
        )


def compile_layers(layers: nn.Module, backend: str) -> Any:
    """A compiled view of `layers`: same weights, same names, with shapes left open.

    Attention depends on the sequence lengths of each micro-batch and would be recompiled every time. So it runs
    uncompiled, between the compiled parts.
    """
    register_attention(compiled=False)
    return torch.compile(layers, backend=backend, dynamic=True)
