"""Chooses the implementation of passes by device and precision.

The plain path runs any model on any device: transformers' modules, one call of torch's attention for each sequence of a
packed row, and for decoding the same modules over the cache. The table below has the faster implementations per device.
Each may decline a model or call that it does not support (another architecture, an adapter, a hook, a soft-cap, a
machine without C compiler); then the plain path runs. When a model is loaded, the probe compares both with the model's
own code.

Work on rows of float32 numbers on a CPU (norms, rotary positions, gates, log-softmax, the draw of a token) goes to the
kernels in C or to torch's operators: `native/library.py::kernels_for` says which, tensor by tensor.

Legend: B rows of a decode step, D width.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from proximo.models.attention.packed import AttentionLayout, PackedKernel
from proximo.models.attention.varlen import VarlenAttention
from proximo.models.cpu.attention import KernelAttention
from proximo.models.cpu.decoding import KernelDecoder
from proximo.models.cpu.fused_layers import FusedLayers
from proximo.models.precision.placement import Precision

Decoder = Callable[[Tensor, Tensor, Cache, AttentionLayout], Tensor]
"""token_ids [B], position_ids [B], cache and layout -> hidden states [B, D] of one more token for each row."""

PackedLayers = FusedLayers
"""Runs packed passes in place of the modules."""

_ACCELERATOR_LOGITS = 512 * 2**20
"""Bytes. The gradient of the output layer's weight is read and written once for each chunk of positions: 8 bytes a
weight, beside 2 operations for each weight and position. On an H100 (989 TFLOP/s, 3.35 TB/s) the two take the same time
at 1,180 positions, and at 256 the memory takes five times as long. 512 MiB are 883 positions of 152 thousand tokens."""


@dataclass(frozen=True, kw_only=True)
class FastPath:
    """The implementations that replace parts of the plain path; None keeps the plain one."""

    attention: type[PackedKernel] | None = None
    """Replaces one call of torch's attention per sequence."""
    layers: Callable[[PreTrainedModel], FusedLayers | None] | None = None
    """Replaces the modules in packed passes, with and without gradients."""
    decoder: Callable[[FusedLayers, Decoder], KernelDecoder | None] | None = None
    """Replaces the modules in decoding, for models whose packed passes run through `layers`."""
    bf16_head: bool = False
    """True: the output layer multiplies bf16 operands, with float32 results. False: float32 operands."""
    logits_bytes: int | None = None
    """Memory for the logits of one chunk of the head; None for `CHUNK_TOKENS` positions (heads.py)."""


_PLAIN = FastPath(logits_bytes=_ACCELERATOR_LOGITS)
_HALF = FastPath(attention=KernelAttention, layers=partial(FusedLayers.of, half=True), decoder=KernelDecoder.of)

PATHS: dict[tuple[str, Precision], FastPath] = {
    ("cpu", Precision.FLOAT32): FastPath(attention=KernelAttention, layers=FusedLayers.of, decoder=KernelDecoder.of),
    ("cpu", Precision.BF16): replace(_HALF, bf16_head=True),
    ("cpu", Precision.BF16_FLOAT32_HEAD): _HALF,
    ("cuda", Precision.FLOAT32): _PLAIN,
    ("cuda", Precision.TF32): _PLAIN,
    ("cuda", Precision.BF16): FastPath(attention=VarlenAttention, bf16_head=True, logits_bytes=_ACCELERATOR_LOGITS),
    ("cuda", Precision.BF16_FLOAT32_HEAD): FastPath(attention=VarlenAttention, logits_bytes=_ACCELERATOR_LOGITS),
    ("mps", Precision.FLOAT32): _PLAIN,
    ("mps", Precision.BF16): FastPath(bf16_head=True, logits_bytes=_ACCELERATOR_LOGITS),
    ("mps", Precision.BF16_FLOAT32_HEAD): _PLAIN,
}
"""(Device type, precision) -> implementations."""

_PLANNED_DEVICE: ContextVar[str | None] = ContextVar("planned_device", default=None)


def fast_path(device: str, precision: Precision) -> FastPath:
    """The entry of `PATHS` for a device type; the plain path for a type that is not in it."""
    return PATHS.get((_PLANNED_DEVICE.get() or device, precision), _PLAIN)


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
