"""How much memory the process has needed so far. No profiler."""

import resource
import sys

import torch


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory in MiB: of the accelerator's tensors on CUDA, else resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
