"""Draws weights without changing the state of torch's global generators."""

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def own_randomness(device: torch.device, *, seed: int = 0) -> Generator[None]:
    """Seed the global generators of the CPU and `device` inside; restore their state afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
