"""Chooses the implementation of passes by device and precision.

The plain path runs any model on any device: transformers' modules, one call of torch's attention for each sequence of a
packed row, and for decoding the same modules over the cache. The table below has the faster implementations per device.
Some are here; those of a plug-in, such as `proximo_cpu`, are entered when the table is first read (`kernels.py`). Each
may decline a model or call that it does not support (another architecture, an adapter, a hook, a soft-cap, a machine
without C compiler); then the plain path runs. When a model is loaded, the probe compares both with the model's own
code.

Legend: B rows of a decode step, T packed tokens, R requested rows of them, D width.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from proximo.kernels import kernels_of
from proximo.models.attention.packed import AttentionLayout, PackedKernel
from proximo.models.attention.varlen import VarlenAttention
from proximo.models.packing import Packed
from proximo.models.precision.placement import Precision

Decoder = Callable[[Tensor, Tensor, Cache, AttentionLayout], Tensor]
"""token_ids [B], position_ids [B], cache and layout -> hidden states [B, D] of new tokens, for which the
layout has places in the cache."""

PART_SCOPE: ContextVar[Callable[[str], AbstractContextManager[None]] | None] = ContextVar("part_scope", default=None)
"""To be entered around each part of a layer by layers that run without their modules. The fake-tensor profiler sets it,
to attribute tensors to parts."""


class PackedLayers(Protocol):
    """Runs packed passes in place of the modules, with and without gradients."""

    def run(
        self, packed: Packed, layout: AttentionLayout, *, rows: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Hidden states after the final norm: [T, D], or [R, D] of the distinct flat indices `rows` [R].

        Passes the keys and values of all tokens to `cache`, if there is one.
        """
        ...


_ACCELERATOR_LOGITS = 512 * 2**20
"""Bytes. The gradient of the output layer's weight is read and written once for each chunk of positions: 8 bytes a
weight, and 2 operations for each weight and position. On an H100 (989 TFLOP/s, 3.35 TB/s) the two take the same time
at 1,180 positions, and at 256 the memory takes five times as long. 512 MiB are 883 positions of 152 thousand tokens."""


@dataclass(frozen=True, kw_only=True)
class FastPath:
    """The implementations that replace parts of the plain path; None keeps the plain one."""

    attention: type[PackedKernel] | None = None
    """Replaces one call of torch's attention per sequence."""
    layers: Callable[[PreTrainedModel], PackedLayers | None] | None = None
    """Replaces the modules in packed passes. Asked before each pass, because modules may change."""
    decoder: Callable[[PackedLayers, Decoder], Decoder | None] | None = None
    """Replaces the modules in decoding, for models whose packed passes run through `layers`. The second argument
    decodes with the modules."""
    bf16_head: bool = False
    """True: the output layer multiplies bf16 operands, with float32 results. False: float32 operands."""
    logits_bytes: int | None = None
    """Memory for the logits of one chunk of the head; None for `CHUNK_TOKENS` positions (heads.py)."""
    first_tokens: int = 64
    """New tokens that a row of a decoding cache has room for at first. It grows when a response needs more."""
    prefill_tokens: int = 4096
    """Largest number of prompt tokens in one packed prefill pass."""


_PLAIN = FastPath(logits_bytes=_ACCELERATOR_LOGITS)
# With each growth of the cache, the graphs of decoding passes are captured again; and a prefill pass of fewer tokens is
# done before the host has launched it.
_CUDA = replace(_PLAIN, first_tokens=1024, prefill_tokens=16_384)

_OWN: dict[tuple[str, Precision], FastPath] = {
    ("cpu", Precision.FLOAT32): FastPath(),
    ("cpu", Precision.BF16): FastPath(bf16_head=True),
    ("cpu", Precision.BF16_FLOAT32_HEAD): FastPath(),
    ("cuda", Precision.FLOAT32): _CUDA,
    ("cuda", Precision.TF32): _CUDA,
    ("cuda", Precision.BF16): replace(_CUDA, attention=VarlenAttention, bf16_head=True),
    ("cuda", Precision.BF16_FLOAT32_HEAD): replace(_CUDA, attention=VarlenAttention),
    ("mps", Precision.FLOAT32): _PLAIN,
    ("mps", Precision.BF16): FastPath(bf16_head=True, logits_bytes=_ACCELERATOR_LOGITS),
    ("mps", Precision.BF16_FLOAT32_HEAD): _PLAIN,
}
"""The table without plug-ins."""

_PLANNED_DEVICE: ContextVar[str | None] = ContextVar("planned_device", default=None)


@cache
def paths() -> dict[tuple[str, Precision], FastPath]:
    """The table: (device type, precision) -> implementations, made once per process."""
    return {
        (device, precision): replace(path, **kernels_of(device).passes(half=precision.is_half))
        for (device, precision), path in _OWN.items()
    }


def fast_path(device: str, precision: Precision) -> FastPath:
    """The entry of the table for a device type; the plain path for a type that is not in it."""
    return paths().get((_PLANNED_DEVICE.get() or device, precision), _PLAIN)


@contextmanager
def planning_for(device: str) -> Generator[None]:
    """Inside, in this thread, all models take the paths of this device type.

    The memory planner runs on a CPU and uses it to profile the passes of another device.
    """
    token = _PLANNED_DEVICE.set(device.partition(":")[0])
    try:
        yield
    finally:
        _PLANNED_DEVICE.reset(token)
