"""The draw of `sampling.sample` from the full softmax as one kernel for CUDA, in Triton: it reads the logits twice.

torch's operators read and write [B, V] numbers 26 times for a token. They remain the definition: the kernel has the
same hash, and is compared with them on the device before it is used (`draws_as`).

Legend: B rows, V vocabulary.
"""

import warnings
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Token ids that a program works on at a time."""
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_SPLITMIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_SPLITMIX_2 = tl.constexpr(0x94D049BB133111EB)
_WEYL = tl.constexpr(0x9E3779B9)
_MIX_1 = tl.constexpr(0x7FEB352D)
_MIX_2 = tl.constexpr(0x846CA68B)
_SCALE = tl.constexpr(2**-31 * (1 - 2**-24))


class Draw(Protocol):
    """Draws a token for each row."""

    def __call__(
        self, logits: Tensor, *, streams: Tensor, positions: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """logits [B, V], streams and positions [B] int64 -> tokens [B] int64 and log-probs [B] float32."""
        ...


@triton.jit
def _noise(low: tl.tensor, high: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """`sampling.exponential_noise` of one row for these token ids, in float32."""
    bits = ids.to(tl.uint32) * _WEYL + low
    bits = (bits ^ (bits >> 16)) * _MIX_1 + high
    bits = (bits ^ (bits >> 15)) * _MIX_2
    bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
    small = (bits.to(tl.int32).to(tl.float32) + 0.5) * -_SCALE
    # log1p: the logarithm of a number near 1, without the digits that are lost in 1 + x.
    near = 1.0 + small
    return -tl.where(near == 1.0, small, tl.log(near) * (small / (near - 1.0)))


@triton.jit
def _draw(  # noqa: PLR0917 - Triton's kernels get their tensors in order
    logits: tl.tensor,
    row_stride: tl.tensor,
    streams: tl.tensor,
    positions: tl.tensor,
    tokens: tl.tensor,
    logprobs: tl.tensor,
    temperature: tl.tensor,
    num_tokens: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program draws the token of one row."""
    row = tl.program_id(0)
    key = tl.load(streams + row).to(tl.uint64) + tl.load(positions + row).to(tl.uint64) * _GOLDEN
    key = (key ^ (key >> 30)) * _SPLITMIX_1
    key = (key ^ (key >> 27)) * _SPLITMIX_2
    key = key ^ (key >> 31)
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    begin = logits + row.to(tl.int64) * row_stride
    peak, total = -float("inf"), 0.0
    for start in range(0, num_tokens, block):
        ids = start + tl.arange(0, block)
        scaled = tl.load(begin + ids, mask=ids < num_tokens, other=-float("inf")).to(tl.float32) / temperature
        higher = tl.maximum(peak, tl.max(scaled, axis=0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(scaled - higher), axis=0)
        peak = higher
    won, token, chosen = -1.0, tl.full([], 0, tl.int64), 0.0
    for start in range(0, num_tokens, block):
        ids = start + tl.arange(0, block)
        scaled = tl.load(begin + ids, mask=ids < num_tokens, other=-float("inf")).to(tl.float32) / temperature
        races = tl.where(ids < num_tokens, tl.exp(scaled - peak) / _noise(low, high, ids), -1.0)
        place = tl.argmax(races, axis=0)
        best = tl.max(races, axis=0)
        of_best = tl.sum(tl.where(tl.arange(0, block) == place, scaled, 0.0), axis=0)
        better = best > won
        token = tl.where(better, (start + place).to(tl.int64), token)
        chosen = tl.where(better, of_best, chosen)
        won = tl.maximum(won, best)
    tl.store(tokens + row, token)
    tl.store(logprobs + row, chosen - (tl.log(total) + peak))


def draw(logits: Tensor, *, streams: Tensor, positions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """logits [B, V] float32 or bf16, streams and positions [B] int64 -> tokens [B] int64 and log-probs [B] float32."""
    num_rows, num_tokens = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    launch: Any = _draw[(num_rows,)]
    launch(rows, rows.stride(0), streams, positions, tokens, logprobs, temperature, num_tokens=num_tokens, block=BLOCK)
    return tokens, logprobs


_AGREED: dict[tuple[str, torch.dtype, int], bool] = {}
"""Device, type of the logits, vocabulary -> whether the kernel draws as torch's operators do."""


def draws_as(plain: Draw, device: torch.device, dtype: torch.dtype, num_tokens: int) -> bool:
    """Whether the kernel draws the tokens of `plain` here, with its log-probs. Tried out once, with eight rows.

    A difference, or an error of Triton, is a warning: torch's operators then draw, more slowly.
    """
    asked = str(device), dtype, num_tokens
    if asked not in _AGREED:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(8, num_tokens, generator=generator).mul(3).to(device, dtype)
        streams = torch.arange(8, device=device) * 0x1234567887654321
        given = {"streams": streams, "positions": torch.arange(8, device=device), "temperature": 0.9}
        try:
            (tokens, logprobs), (expected, theirs) = draw(logits, **given), plain(logits, **given)
            _AGREED[asked] = tokens.equal(expected) and torch.allclose(logprobs, theirs, rtol=1e-5, atol=1e-5)
            why = "it draws other tokens than torch's operators"
        except Exception as error:  # a compiler of another vendor's may raise anything
            _AGREED[asked], why = False, f"{type(error).__name__}: {error}"
        if not _AGREED[asked]:
            warnings.warn(f"the fused sampler is not used on {device}: {why}", stacklevel=2)
    return _AGREED[asked]
