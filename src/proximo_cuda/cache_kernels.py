"""Decoding over the key-value cache as kernels for CUDA, in Triton: new tokens are written, and attend to their rows.

Rows, positions and lengths stay on the device, and each row is read up to its own length: torch's attention with a bias
reads all rows up to the longest. Nothing depends on the number of rows or on the longest one, so that a row's results
do not depend on its company, and a pass can be a CUDA graph. torch's operators, with which a cache does without these
kernels, remain the definition: the kernels are compared with them on the device before they are used (`agree`).

Legend: B rows that decode, H query heads, H_kv key heads, G query heads of one key head, K and W widths of keys and
values, M capacity of a row.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from proximo.models.attention.packed import AttentionOptions, explicit_attention
from proximo_cuda.needs import is_right

CHUNK = 256
"""Keys that one program reads. Longer rows are read by several, whose results a second kernel adds up."""
_BLOCK_BYTES = 2**14
"""Of keys, or values, that a program reads at a time, of at most 64 keys."""


@triton.jit
def _put(  # noqa: PLR0913, PLR0917 - Triton's kernels get their tensors in order
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    sources: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    capacity: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """One program writes one head of one token."""
    token, head, lane = tl.program_id(0), tl.program_id(1), tl.arange(0, lanes)
    source = tl.load(sources + token)
    place = (tl.load(rows + token) * heads + head) * capacity + tl.load(positions + token)
    found = tl.load(key + source * key_token + head * key_head + lane, mask=lane < width)
    tl.store(keys + place * width + lane, found, mask=lane < width)
    found = tl.load(value + source * value_token + head * value_head + lane, mask=lane < value_width)
    tl.store(values + place * value_width + lane, found, mask=lane < value_width)


@triton.jit
def _attend(  # noqa: PLR0913, PLR0917 - Triton's kernels get their tensors in order
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    sinks: tl.tensor,
    sums: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    capacity: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    num_chunks: tl.constexpr,
    key_heads: tl.constexpr,
    group: tl.constexpr,
    group_block: tl.constexpr,
    width: tl.constexpr,
    width_block: tl.constexpr,
    value_width: tl.constexpr,
    value_block: tl.constexpr,
    block: tl.constexpr,
    chunk: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sinks: tl.constexpr,
) -> None:
    """One program reads one chunk of one row and key head, by blocks, with the softmax in one pass."""
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(positions + row) + 1
    storage = (tl.load(rows + row) * key_heads + head) * capacity
    heads, lane, value_lane = tl.arange(0, group_block), tl.arange(0, width_block), tl.arange(0, value_block)
    real = heads < group
    begins = row * query_row + (head * group + heads) * query_head
    asked = tl.load(query + begins[:, None] + lane[None, :], mask=real[:, None] & (lane < width)[None, :], other=0.0)
    peak = tl.full([group_block], -float("inf"), tl.float32)
    total = tl.zeros([group_block], tl.float32)
    summed = tl.zeros([group_block, value_block], tl.float32)
    if part * chunk < length:
        for step in range(chunk // block):
            ids = part * chunk + step * block + tl.arange(0, block)
            seen = (ids < length) & (ids >= length - window)
            places = (storage + ids)[:, None]
            held = seen[:, None] & (lane < width)[None, :]
            key = tl.load(keys + places * width + lane[None, :], mask=held, other=0.0)
            scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
            if has_softcap:
                scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
            scores = tl.where(seen[None, :], scores, -float("inf"))
            higher = tl.maximum(peak, tl.max(scores, axis=1))
            base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing was seen yet
            kept, weights = tl.exp(peak - base), tl.exp(scores - base[:, None])
            total = total * kept + tl.sum(weights, axis=1)
            held = seen[:, None] & (value_lane < value_width)[None, :]
            value = tl.load(values + places * value_width + value_lane[None, :], mask=held, other=0.0)
            summed = summed * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            peak = higher
    of_heads = (row * key_heads + head) * group + heads
    stored = real[:, None] & (value_lane < value_width)[None, :]
    if num_chunks == 1:
        if has_sinks:
            sink = tl.load(sinks + head * group + heads, mask=real, other=0.0).to(tl.float32)
            higher = tl.maximum(peak, sink)
            kept = tl.exp(peak - higher)
            summed, total = summed * kept[:, None], total * kept + tl.exp(sink - higher)
        total = tl.where(real, total, 1.0)
        tl.store(sums + of_heads[:, None] * value_width + value_lane[None, :], summed / total[:, None], mask=stored)
    else:
        slots = of_heads * num_chunks + part
        tl.store(sums + slots[:, None] * value_width + value_lane[None, :], summed, mask=stored)
        tl.store(peaks + slots, peak, mask=real)
        tl.store(totals + slots, total, mask=real)


@triton.jit
def _add_up(  # noqa: PLR0913, PLR0917 - Triton's kernels get their tensors in order
    sums: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    num_heads: tl.constexpr,
    num_chunks: tl.constexpr,
    width: tl.constexpr,
    lanes: tl.constexpr,
    has_sinks: tl.constexpr,
) -> None:
    """One program adds the chunks of one query head of one row."""
    head, lane = tl.program_id(0).to(tl.int64), tl.arange(0, lanes)
    peak, total, summed = -float("inf"), 0.0, tl.zeros([lanes], tl.float32)
    if has_sinks:
        peak, total = tl.load(sinks + head % num_heads).to(tl.float32), 1.0
    for part in range(num_chunks):
        slot = head * num_chunks + part
        theirs = tl.load(peaks + slot)
        if theirs != -float("inf"):
            higher = tl.maximum(peak, theirs)
            kept, weight = tl.exp(peak - higher), tl.exp(theirs - higher)
            total = total * kept + weight * tl.load(totals + slot)
            found = tl.load(sums + slot * width + lane, mask=lane < width, other=0.0)
            summed = summed * kept + weight * found
            peak = higher
    tl.store(output + head * width + lane, summed / total, mask=lane < width)


def put(
    keys: Tensor, values: Tensor, key: Tensor, value: Tensor, *, sources: Tensor, rows: Tensor, positions: Tensor
) -> None:
    """Write T tokens into storage [rows, H_kv, M, K] and [rows, H_kv, M, W], in place.

    key [1, H_kv, C, K], value [1, H_kv, C, W]; sources, rows and positions [T] int64: which of the C tokens goes where.
    """
    key, value = (each if each.stride(3) == 1 else each.contiguous() for each in (key, value))
    launch: Any = _put[(len(sources), keys.shape[1])]
    launch(
        key,
        value,
        keys,
        values,
        sources,
        rows,
        positions,
        key.stride(2),
        key.stride(1),
        value.stride(2),
        value.stride(1),
        keys.shape[2],
        heads=keys.shape[1],
        width=keys.shape[3],
        value_width=values.shape[3],
        lanes=triton.next_power_of_2(max(keys.shape[3], values.shape[3])),
    )


def attend(
    query: Tensor, keys: Tensor, values: Tensor, *, rows: Tensor, positions: Tensor, options: AttentionOptions
) -> Tensor:
    """query [B, H, 1, K], storage [rows, H_kv, M, K] and [rows, H_kv, M, W], rows and positions [B] -> [B, 1, H, W].

    The new token of row `rows[b]` is at `positions[b]`, and attends to the tokens up to itself. Ignores dropout.
    """
    num_rows, num_heads, _, width = query.shape
    (key_heads, capacity), value_width = keys.shape[1:3], values.shape[3]
    num_chunks, group = -(-capacity // CHUNK), num_heads // key_heads
    output = torch.empty(num_rows, 1, num_heads, value_width, dtype=values.dtype, device=query.device)
    sums = peaks = totals = output
    if num_chunks > 1:
        sums = torch.empty(num_rows, num_heads, num_chunks, value_width, dtype=torch.float32, device=query.device)
        peaks, totals = (sums.new_empty(num_rows, num_heads, num_chunks) for _ in range(2))
    query = query if query.stride(3) == 1 else query.contiguous()
    width_block, value_block = (max(16, triton.next_power_of_2(each)) for each in (width, value_width))
    sinks = query if options.sinks is None else options.sinks
    launch: Any = _attend[(num_rows, key_heads, num_chunks)]
    launch(
        query,
        keys,
        values,
        rows,
        positions,
        sinks,
        sums,
        peaks,
        totals,
        query.stride(0),
        query.stride(1),
        capacity,
        1 / math.sqrt(width) if options.scaling is None else options.scaling,
        options.softcap or 1.0,
        options.sliding_window or capacity,
        num_chunks=num_chunks,
        key_heads=key_heads,
        group=group,
        group_block=max(16, triton.next_power_of_2(group)),
        width=width,
        width_block=width_block,
        value_width=value_width,
        value_block=value_block,
        block=_block_of(max(width_block, value_block) * keys.element_size()),
        chunk=CHUNK,
        has_softcap=options.softcap is not None,
        has_sinks=options.sinks is not None,
    )
    if num_chunks > 1:
        add: Any = _add_up[(num_rows * num_heads,)]
        more = {"num_heads": num_heads, "num_chunks": num_chunks, "width": value_width, "lanes": value_block}
        add(sums, peaks, totals, sinks, output, **more, has_sinks=options.sinks is not None)
    return output


def _block_of(bytes_of_key: int) -> int:
    """Keys that a program reads at a time, so that what it holds of them fits into its multiprocessor."""
    return max(16, min(64, _BLOCK_BYTES // bytes_of_key))


_AGREED: dict[tuple[Any, ...], bool] = {}
"""Device, type, heads and widths, soft-cap and sinks -> whether the kernels compute what torch's operators do."""


def agree(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> bool:
    """Whether the kernels compute here what torch's operators do. Tried once for each kind of call."""
    kind = options.softcap is not None, options.sinks is not None, query.dtype, keys.dtype, values.dtype
    asked = (query.device, *kind, query.shape[1], query.shape[3], keys.shape[1], values.shape[3])

    def why_not() -> str | None:
        error, most = _error(query, keys, values, options), 1e-4 if keys.dtype is torch.float32 else 0.05
        return None if error <= most else f"their error is {error:.2g}"

    if asked not in _AGREED:
        _AGREED[asked] = is_right("kernels of decoding are", query.device, why_not)
    return _AGREED[asked]


class CacheKernels:
    """The functions of this file, as `proximo.kernels.DecodingKernels`."""

    put = staticmethod(put)
    attend = staticmethod(attend)
    agree = staticmethod(agree)


def kernels_for(keys: Tensor, values: Tensor) -> CacheKernels | None:
    """The kernels for storage like this; None without a device, or where they are not right."""
    if not torch.cuda.is_available() or isinstance(keys, FakeTensor):
        return None
    if keys.device.index != torch.cuda.current_device():  # where Triton would launch
        return None
    return CacheKernels() if agree(keys[:1, :, :1], keys, values, AttentionOptions()) else None


def _error(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> float:
    """The largest difference to `explicit_attention` in float32, for a row of two chunks and a short one."""
    generator = torch.Generator().manual_seed(0)

    def made(like: Tensor, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(like.device, like.dtype)

    capacity, (num_heads, key_heads) = CHUNK + 40, (query.shape[1], keys.shape[1])
    asked = made(query, 2, num_heads, 1, query.shape[3])
    # NaN beyond the end of a row shows that nothing of it is read.
    stored = [each.new_full((3, key_heads, capacity, each.shape[3]), math.nan) for each in (keys, values)]
    new = [made(each, 1, key_heads, capacity, each.shape[3]) for each in (keys, values)]
    positions, tokens = (torch.tensor(each, device=query.device) for each in ([capacity - 1, 5], range(capacity)))
    for row, count in ((2, capacity), (0, 6)):
        some = tokens[:count]
        put(*stored, *new, sources=some, rows=torch.full_like(some, row), positions=some)
    found = attend(asked, *stored, rows=torch.tensor([2, 0], device=query.device), positions=positions, options=options)
    distance = positions[:, None] - tokens
    seen = (distance >= 0) & (distance < (options.sliding_window or capacity))
    wide = asked.float(), *(each.float().expand(2, -1, -1, -1) for each in new)
    expected = explicit_attention(*wide, seen[:, None, None], options).transpose(1, 2)
    return (found.float() - expected).abs().max().item()
