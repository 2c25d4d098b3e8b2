"""Describes what decides the bits of a run besides its settings: machine, libraries, threads, variables.

Imports no torch before it is asked."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from proximo.distributed.world import current
from proximo.kernels import kernels_of

VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_DOMAIN_NUM_THREADS",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_DYNAMIC",
    "OMP_THREAD_LIMIT",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Variables that override instructions or numbers of threads."""


def describe_environment(*, device: str) -> dict[str, Any]:
    """Versions, threads, ranks, processor, kernels, variables and, for a CUDA device, the accelerator.

    JSON, the same on every call.
    """
    import torch

    return {
        **versions(),
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "kernels": kernels_of(device).description(),
        "num_threads": torch.get_num_threads(),
        "num_ranks": current().size,
        "device": device,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "accelerator": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else None,
    }


def _processor() -> str:
    """The model name, by which libraries choose kernels: from /proc/cpuinfo on Linux, else from `platform`."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


PACKAGES = ("proximo", "torch", "transformers", "tokenizers", "peft", "datasets", "safetensors", "numpy")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide the bits of a run."""
    return {"python": platform.python_version(), **{package: installed_version(package) for package in PACKAGES}}


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
