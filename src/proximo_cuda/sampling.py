"""The draw of `sampling.sample` from the full softmax by kernels for CUDA, in Triton: they read the logits twice.

torch's operators read and write [B, V] numbers 26 times for a token. They remain the definition: the kernels have the
same hash, and are compared with them on the device before they are used (`draws_as`).

Legend: B rows, V vocabulary.
"""

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from proximo_cuda.needs import is_right

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
def _bits(stream: tl.tensor, position: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """The 31 bits of `sampling.exponential_noise` of one row for these token ids."""
    key = stream.to(tl.uint64) + position.to(tl.uint64) * _GOLDEN
    key = (key ^ (key >> 30)) * _SPLITMIX_1
    key = (key ^ (key >> 27)) * _SPLITMIX_2
    key = key ^ (key >> 31)
    bits = ids.to(tl.uint32) * _WEYL + key.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * _MIX_1 + (key >> 32).to(tl.uint32)
    bits = (bits ^ (bits >> 15)) * _MIX_2
    return ((bits ^ (bits >> 16)) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _noise(bits: tl.tensor) -> tl.tensor:
    """Draws of the standard exponential distribution, in float32."""
    small = (bits.to(tl.float32) + 0.5) * -_SCALE
    # log1p: the logarithm of a number near 1, without the digits that are lost in 1 + x.
    near = 1.0 + small
    return -tl.where(near == 1.0, small, tl.log(near) * (small / (near - 1.0)))


@triton.jit
def _weigh(  # noqa: PLR0917 - Triton's kernels get their tensors in order
    logits: tl.tensor,
    row_stride: tl.tensor,
    temperature: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    num_tokens: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program reads one block of a row: the largest logit, and the sum of exp(logit - largest)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * block + tl.arange(0, block)
    found = tl.load(logits + row * row_stride + ids, mask=ids < num_tokens, other=-float("inf"))
    scaled = found.to(tl.float32) / temperature
    peak = tl.max(scaled, axis=0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    tl.store(peaks + row * tl.num_programs(1) + part, peak)
    tl.store(totals + row * tl.num_programs(1) + part, tl.sum(tl.exp(scaled - base), axis=0))


@triton.jit
def _race(  # noqa: PLR0913, PLR0917
    logits: tl.tensor,
    row_stride: tl.tensor,
    temperature: tl.tensor,
    streams: tl.tensor,
    positions: tl.tensor,
    peaks: tl.tensor,
    races: tl.tensor,
    winners: tl.tensor,
    scores: tl.tensor,
    num_tokens: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """One program races the tokens of one block of a row."""
    row, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    lane = tl.arange(0, lanes)
    peak = tl.max(tl.load(peaks + row * num_parts + lane, mask=lane < num_parts, other=-float("inf")), axis=0)
    ids = part * block + tl.arange(0, block)
    found = tl.load(logits + row * row_stride + ids, mask=ids < num_tokens, other=-float("inf"))
    scaled = found.to(tl.float32) / temperature
    noise = _noise(_bits(tl.load(streams + row), tl.load(positions + row), ids))
    each = tl.where(ids < num_tokens, tl.exp(scaled - peak) / noise, -1.0)
    place = tl.argmax(each, axis=0)
    slot = row * num_parts + part
    tl.store(races + slot, tl.max(each, axis=0))
    tl.store(winners + slot, part * block + place)
    tl.store(scores + slot, tl.sum(tl.where(tl.arange(0, block) == place, scaled, 0.0), axis=0))


@triton.jit
def _decide(  # noqa: PLR0917
    peaks: tl.tensor,
    totals: tl.tensor,
    races: tl.tensor,
    winners: tl.tensor,
    scores: tl.tensor,
    tokens: tl.tensor,
    logprobs: tl.tensor,
    num_parts: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """One program takes the first of the best of a row's blocks."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, lanes)
    slots, real = row * num_parts + lane, lane < num_parts
    peak_of_each = tl.load(peaks + slots, mask=real, other=-float("inf"))
    peak = tl.max(peak_of_each, axis=0)
    total = tl.sum(tl.load(totals + slots, mask=real, other=0.0) * tl.exp(peak_of_each - peak), axis=0)
    best = row * num_parts + tl.argmax(tl.load(races + slots, mask=real, other=-1.0), axis=0)
    tl.store(tokens + row, tl.load(winners + best).to(tl.int64))
    tl.store(logprobs + row, tl.load(scores + best) - (tl.log(total) + peak))


def draw(logits: Tensor, *, streams: Tensor, positions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """logits [B, V] float32 or bf16, streams and positions [B] int64 -> tokens [B] int64 and log-probs [B] float32."""
    num_rows, num_tokens = logits.shape
    num_parts = triton.cdiv(num_tokens, BLOCK)
    peaks, totals, races, scores = torch.empty(4, num_rows, num_parts, dtype=torch.float32, device=logits.device)
    winners = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    launch_weigh: Any = _weigh[(num_rows, num_parts)]
    launch_race: Any = _race[(num_rows, num_parts)]
    launch_decide: Any = _decide[(num_rows,)]
    sizes = {"num_tokens": num_tokens, "block": BLOCK}
    lanes = triton.next_power_of_2(num_parts)
    given = rows, rows.stride(0), temperature
    launch_weigh(*given, peaks, totals, **sizes)
    launch_race(*given, streams, positions, peaks, races, winners, scores, **sizes, lanes=lanes)
    launch_decide(peaks, totals, races, winners, scores, tokens, logprobs, num_parts=num_parts, lanes=lanes)
    return tokens, logprobs


_AGREED: dict[tuple[str, torch.dtype, int], bool] = {}
"""Device, type of the logits, vocabulary -> whether the kernel draws as torch's operators do."""


def draws_as(plain: Draw, device: torch.device, dtype: torch.dtype, num_tokens: int) -> bool:
    """Whether the kernels draw the tokens of `plain` here, with its log-probs. Tried out once, with eight rows."""
    asked = str(device), dtype, num_tokens

    def why_not() -> str | None:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(8, num_tokens, generator=generator).mul(3).to(device, dtype)
        streams = torch.arange(8, device=device) * 0x1234567887654321
        given = {"streams": streams, "positions": torch.arange(8, device=device), "temperature": 0.9}
        (tokens, logprobs), (expected, theirs) = draw(logits, **given), plain(logits, **given)
        right = tokens.equal(expected) and torch.allclose(logprobs, theirs, rtol=1e-5, atol=1e-5)
        return None if right else "it draws other tokens than torch's operators"

    if asked not in _AGREED:
        _AGREED[asked] = is_right("sampler is", device, why_not)
    return _AGREED[asked]
