"""Resolves the device and the precision of a run."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum

import torch

from proximo.distributed.rank_environment import device_index
from proximo.distributed.world import World, current
from proximo.errors import ConfigError


class Precision(StrEnum):
    """The arithmetic of products. Trained weights and log-softmax are always float32 (or float64 in such models)."""

    FLOAT32 = "float32"
    TF32 = "tf32"
    """float32 numbers; CUDA reads 10 bits after the point of operands. A mode of the device (`use_tf32`)."""
    BF16 = "bf16"
    """Products in bfloat16; those of the output layer with float32 results (products.py)."""
    BF16_FLOAT32_HEAD = "bf16_float32_head"
    """The same, but for the output layer, whose products are float32."""

    @property
    def is_half(self) -> bool:
        """True where layers compute in bfloat16."""
        return self in (Precision.BF16, Precision.BF16_FLOAT32_HEAD)


def resolve_precision(name: str, *, device: str = "cpu", float32_head: bool = False) -> Precision:
    """The precision of a name; `auto` is chosen by the device. `float32_head`: float32 products of the output layer if
    the layers are bf16.

    Raises ConfigError for anything but auto, float32, tf32 and bf16, and for tf32 on other devices than CUDA. For fp16
    the message has the reason.
    """
    if name == "auto":
        name = "bf16" if _has_bf16(device) else "float32"
    if name in ("fp16", "float16", "half"):
        raise ConfigError(
            f"precision {name} is not offered: its largest number is 65504, so gradients and soft-max scores overflow "
            "without loss scaling, and scaled steps are skipped at random; use bf16 or float32"
        )
    if name in ("bf16", "bfloat16"):
        return Precision.BF16_FLOAT32_HEAD if float32_head else Precision.BF16
    if name not in ("float32", "tf32"):
        raise ConfigError(f"precision must be auto, float32, tf32 or bf16, not {name!r}")
    if name == "tf32" and not device.startswith("cuda"):
        raise ConfigError(f"run.precision tf32 is for CUDA devices, and the device is {device}: use float32 or auto")
    return Precision(name)


def use_tf32(precision: Precision) -> None:
    """Let CUDA multiply in TF32 in this process if `precision` is tf32, and forbid it otherwise.

    A pipeline runs its stages in one process, and their precisions may differ.
    """
    torch.backends.cuda.matmul.allow_tf32 = precision is Precision.TF32


def use_deterministic_kernels(wanted: bool, device: torch.device) -> None:
    """Let CUDA compute the same bits in every run, in this process. On other devices nothing changes.

    An operator without such a kernel raises RuntimeError. To be called before the first product on the device, since
    cuBLAS reads its setting then.
    """
    if device.type != "cuda":
        return
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    torch._C._set_deterministic_fill_uninitialized_memory(False)  # it would write into every new tensor


@contextmanager
def without_tf32() -> Generator[None]:
    """Disable TF32 products on CUDA inside."""
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def say_precision(name: str, device: str) -> str | None:
    """A message with the precision that `auto` chose and why; None if `name` is not `auto`."""
    if name != "auto":
        return None
    if _has_bf16(device):
        return f"precision: bf16, because run.precision is auto and the device is {device}"
    why = f"{device} has no bf16" if device.startswith("cuda") else f"the device is {device}, not a CUDA one"
    return f"precision: float32, because run.precision is auto and {why}"


def _has_bf16(device: str) -> bool:
    """True if a device has bf16. Assumes it for CUDA on a machine without CUDA, where only plans are made."""
    if not device.startswith("cuda"):
        return False
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def _device_of_rank(name: str, world: World) -> torch.device:
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices == 0 and name == "auto":
        return torch.device("cpu")
    index = device_index(local_rank=world.local_rank, local_size=world.local_size, num_devices=num_devices)
    problem = None
    if world.with_same_device:
        problem = f"ranks {', '.join(map(str, world.with_same_device))} have the same CUDA device"
    elif index is None:
        problem = f"{world.local_size} ranks run on this machine, and each sees {num_devices} CUDA devices of it"
    if problem is not None:
        raise ConfigError(
            f"{problem}: start one rank per device, and let it see all devices of the machine or only its own (Slurm: "
            "--gpus-per-node, or --gpus-per-task=1), or use run.device=cpu"
        )
    return torch.device("cuda", 0 if index is None else index)


def resolve_device(name: str) -> torch.device:
    """`auto` takes CUDA, then MPS, then the CPU. Raises ConfigError for a device that is not there.

    On several ranks `auto` and `cuda` are the CUDA device with the number of the rank on its machine, or the only one
    that the rank sees, or the CPU.
    """
    if current().size > 1 and name in ("auto", "cuda"):
        return _device_of_rank(name, current())
    available = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available, "cpu": lambda: True}
    if name == "auto":
        return torch.device(next(kind for kind, is_there in available.items() if is_there()))
    kind, _, index = name.partition(":")
    if kind not in available or not (index == "" or index.isdecimal()):
        raise ConfigError(f"device must be auto, cpu, cuda, cuda:N or mps, not {name!r}")
    if not available[kind]():
        raise ConfigError(f"device {name} was asked for, but this machine has none that torch can use; use auto or cpu")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise ConfigError(f"device {name} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return torch.device(name)
