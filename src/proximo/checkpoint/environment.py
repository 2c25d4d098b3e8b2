"""What of the machine and the libraries decides the bits of a run. Not the settings of the run."""

import platform
from pathlib import Path

import torch

from proximo.checkpoint.versions import installed_version
from proximo.native.library import describe_kernels

PACKAGES = ("proximo", "torch", "transformers", "tokenizers", "peft", "datasets", "safetensors", "numpy")


def describe_environment(*, device: str) -> dict[str, str | int | None]:
    """Versions, thread count, processor, kernels in C and, for a CUDA device, the accelerator.

    JSON, flat, the same on every call.
    """
    return {
        "python": platform.python_version(),
        **{package: installed_version(package) for package in PACKAGES},
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "kernels": describe_kernels() if torch.device(device).type == "cpu" else None,
        "num_threads": torch.get_num_threads(),
        "device": device,
        "accelerator": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else None,
    }


def _processor() -> str:
    """The model name: kernels are chosen by it. Linux keeps it in a file, others tell it to `platform`."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
