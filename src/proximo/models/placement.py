"""Where a model runs and in which numbers. Not how weights are loaded."""

from enum import StrEnum

import torch

from proximo.errors import ConfigError


class Precision(StrEnum):
    """The arithmetic of the backbone. Weights, heads and log-softmax are float32 in both (float64 models stay so)."""

    FLOAT32 = "float32"
    BF16 = "bf16"
    """Products in bfloat16 by autocast."""


def resolve_precision(name: str) -> Precision:
    """Raises ConfigError for anything but float32 and bf16, fp16 with the reason."""
    if name in ("fp16", "float16", "half"):
        raise ConfigError(
            f"precision {name} is not offered: its largest number is 65504, so gradients and soft-max scores overflow "
            "without loss scaling, and scaled steps are skipped at random; say bf16 or float32"
        )
    if name == "bfloat16":
        return Precision.BF16
    if name not in {precision.value for precision in Precision}:
        raise ConfigError(f"precision must be float32 or bf16, not {name!r}")
    return Precision(name)


def resolve_device(name: str) -> torch.device:
    """`auto` takes CUDA, then MPS, then the CPU. Raises ConfigError for a device that is not there."""
    available = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available, "cpu": lambda: True}
    if name == "auto":
        return torch.device(next(kind for kind, is_there in available.items() if is_there()))
    kind, _, index = name.partition(":")
    if kind not in available or not (index == "" or index.isdecimal()):
        raise ConfigError(f"device must be auto, cpu, cuda, cuda:N or mps, not {name!r}")
    if not available[kind]():
        raise ConfigError(f"device {name} was asked for, but this machine has none that torch can use; say auto or cpu")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise ConfigError(f"device {name} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return torch.device(name)
