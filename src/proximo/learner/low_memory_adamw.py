"""bitsandbytes' AdamW with moments of 8 bits a number (arXiv:2110.02861).

Tensors of fewer than 4,096 numbers keep float32 moments. `adamw_paged_8bit` keeps the moments in memory that CUDA
moves to the host when the device is full.
"""

import importlib
import importlib.util
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from proximo.errors import ConfigError, MissingExtraError

LowMemoryKind = Literal["adamw_8bit", "adamw_paged_8bit"]


def check_low_memory(kind: str, device: torch.device) -> None:
    """Raises MissingExtraError or ConfigError where this machine cannot run the optimizer; loads nothing."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtraError(
            f'optimizer kind {kind} needs bitsandbytes: pip install "proximo[low-memory]", or set kind: adamw'
        )
    if kind == "adamw_paged_8bit" and device.type != "cuda":
        raise ConfigError(
            f"optimizer kind {kind} pages its state between a CUDA device and the host, and this run is on "
            f"{device.type}: use adamw_8bit"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"optimizer kind {kind} runs on CUDA and on the CPU, not on {device.type}: use adamw")


def make_low_memory(kind: LowMemoryKind, groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    """The optimizer; `options` are those of torch's AdamW. Raises as `check_low_memory`."""
    check_low_memory(kind, groups[0]["params"][0].device)
    optimizers: Any = importlib.import_module("bitsandbytes.optim")  # takes seconds
    make = optimizers.AdamW8bit if kind == "adamw_8bit" else optimizers.PagedAdamW8bit
    return make(groups, **options)


def page_state(optimizer: Optimizer) -> None:
    """Move moments that were read from a checkpoint into paged memory, if the optimizer uses it."""
    if not getattr(optimizer, "is_paged", False):
        return
    paged: Any = optimizer
    for parameter, state in optimizer.state.items():
        for name in ("state1", "state2"):
            buffer = paged.get_state_buffer(parameter, dtype=state[name].dtype)
            state[name] = buffer.copy_(state[name])
