"""Exponential noise as a pure function of stream, position and token id, without a generator.

A row's stream and a token position give a 64-bit key by the SplitMix64 finaliser (Steele, Lea and Flood 2014,
"Fast splittable pseudorandom number generators"). The key and a token id give 31 bits by a 32-bit multiply-and-shift
mixer; one half of the key is added before each of its two multiplications. Integers wrap equally on every device, so
the noise is the same everywhere.

Legend: B rows, V vocabulary.
"""

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB
"""2^64 divided by the golden ratio, as a signed number: successive positions start far apart."""
_SPLITMIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as signed numbers."""
_WEYL = -0x61C88647
"""2^32 divided by the golden ratio, as a signed number."""
_MIX = (0x7FEB352D, -0x7B935975)
"""Odd multipliers of the 32-bit mixer (0x846CA68B is the second, as a signed number)."""
_SCALE = 2**-31 * (1 - 2**-24)
"""Maps 31 bits to numbers below 1, also if float32 rounds them up."""


def exponential_noise(streams: Tensor, positions: Tensor, num_tokens: int, *, dtype: torch.dtype) -> Tensor:
    """One independent draw of the standard exponential distribution for each row and token id.

    streams [B] int64 (`RandomKey.stream`), positions [B] int64 -> [B, V] of `dtype`, between 2^-32 and 17.
    The draw is the same in every dtype, up to rounding. Rounding grows with the draw, but large draws rarely win.
    """
    low, high = _position_keys(streams, positions)
    bits = torch.arange(num_tokens, dtype=torch.int32, device=streams.device).mul_(_WEYL) + low[:, None]
    scratch = _shift_xor(bits, 16).mul_(_MIX[0]).add_(high[:, None])
    _shift_xor(_shift_xor(scratch, 15).mul_(_MIX[1]), 16).bitwise_and_(0x7FFFFFFF)
    # log1p keeps the full resolution of small draws, which are the ones that win a race.
    return scratch.to(dtype).add_(0.5).mul_(-_SCALE).log1p_().neg_()


def _position_keys(streams: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The low half [B] int32 and the high half [B] int32 of each row's 64-bit key."""
    key = streams + positions * _GOLDEN
    for shift, factor in ((30, _SPLITMIX[0]), (27, _SPLITMIX[1])):
        key = _shift_xor(key, shift) * factor
    key = _shift_xor(key, 31)
    return ((key << 32) >> 32).to(torch.int32), (key >> 32).to(torch.int32)


def _shift_xor(bits: Tensor, shift: int) -> Tensor:
    """bits ^ (bits >> shift), in place, with a logical shift: torch's shift of signed integers copies the sign bit."""
    width = torch.iinfo(bits.dtype).bits
    return bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (width - shift)) - 1))
