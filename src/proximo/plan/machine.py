"""This machine as it is measured (device, memory, FLOP/s of matrix products), and what others are taken to do."""

import os
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from proximo.config.run import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What devices and links do, for predicted times. Bytes and operations per second, of one device."""

    flops: float
    memory: float
    """Of the device's own memory: decoding reads all weights for each token."""
    inside: float
    """Between devices of one machine."""
    between: float
    """Between machines."""
    host: float
    """Between a device and its host's memory."""
    devices: int
    """Devices of one machine."""


MACHINES: Mapping[str, Machine] = {
    "cuda": Machine(flops=400e12, memory=2.5e12, inside=300e9, between=40e9, host=25e9, devices=8),
    "cpu": Machine(flops=0.05e12, memory=10e9, inside=1e9, between=1e9, host=10e9, devices=8),
    "mps": Machine(flops=5e12, memory=200e9, inside=1e9, between=1e9, host=100e9, devices=1),
}
"""By kind of device; `cuda` is an H100 in bf16 at 40% of its peak, with NVLink and one link of 400 Gbit/s for each."""


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
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
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


def product_rate(device: str, *, precision: str, width: int = 1024) -> float:
    """FLOP/s of a square matrix product of side `width`, the best of five runs."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    left = torch.ones(width, width, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        (left @ left).sum().item()  # item() waits for the accelerator
        best = min(best, time.perf_counter() - start)
    return 2 * width**3 / best
