"""Measures this machine: device and memory."""

import os
import resource
from pathlib import Path

import torch

from proximo.config.run import RunConfig

_CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")


def device_kind(run: RunConfig) -> str:
    """cpu, cuda or mps. A device that the recipe names is not checked, since a plan may be for another machine."""
    if run.device != "auto":
        return run.device.partition(":")[0]
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def memory_bytes(device: str) -> int | None:
    """Bytes of device memory that this process may use; None if this machine lacks the accelerator."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory if torch.cuda.is_available() else None
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CONTROL_GROUP.read_text(encoding="ascii").strip() if _CONTROL_GROUP.is_file() else "max"
    return physical if limit == "max" else min(physical, int(limit))


def process_bytes() -> int:
    """Resident memory of this process in bytes.

    Once torch and transformers are imported, this is what every run holds before its first step.
    """
    statistics = Path("/proc/self/statm")
    if statistics.is_file():
        return int(statistics.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
