"""Drawing weights without touching torch's global generators. Not the randomness of sampling or of data order."""

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def own_randomness(device: torch.device, *, seed: int = 0) -> Generator[None]:
    """Inside, generators of the CPU and of `device` begin at `seed`; afterwards they are where they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
