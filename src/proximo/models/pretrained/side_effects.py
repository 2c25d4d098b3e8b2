"""Keeps calls of transformers from side effects: on torch's random state, and on the terminal."""

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


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Disable progress bars, warnings and load reports inside; restore the settings afterwards."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
