"""The kernels of `row_kernels.py`, in Triton. They read and write float32 or bf16, and compute in float32.

Legend: T rows, D width, H heads, K head width, V vocabulary.
"""

import triton
import triton.language as tl


@triton.jit
def norm(  # noqa: PLR0913, PLR0917 - Triton's kernels get their tensors in order
    rows: tl.tensor,
    added: tl.tensor,
    summed: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    inverses: tl.tensor,
    row_stride: tl.tensor,
    epsilon: tl.tensor,
    width: tl.constexpr,
    lanes: tl.constexpr,
    adds: tl.constexpr,
) -> None:
    """One program norms one row: w x / rms(x), where `added` is first added to x, which is then stored in `summed`."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, lanes)
    real = lane < width
    values = tl.load(rows + row * row_stride + lane, mask=real, other=0.0).to(tl.float32)
    if adds:
        values += tl.load(added + row * width + lane, mask=real, other=0.0).to(tl.float32)
        tl.store(summed + row * width + lane, values, mask=real)
    inverse = 1 / tl.sqrt_rn(tl.sum(values * values, axis=0) / width + epsilon)
    factor = tl.load(weight + lane, mask=real, other=0.0).to(tl.float32)
    tl.store(output + row * width + lane, values * inverse * factor, mask=real)
    tl.store(inverses + row, inverse)


@triton.jit
def scale(  # noqa: PLR0917
    rows: tl.tensor,
    inverses: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    width: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """One program makes the output of `norm` for one row again."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, lanes)
    real = lane < width
    values = tl.load(rows + row * width + lane, mask=real, other=0.0).to(tl.float32)
    factor = tl.load(weight + lane, mask=real, other=0.0).to(tl.float32)
    tl.store(output + row * width + lane, values * tl.load(inverses + row) * factor, mask=real)


@triton.jit
def norm_backward(  # noqa: PLR0913, PLR0917
    gradient: tl.tensor,
    rows: tl.tensor,
    inverses: tl.tensor,
    weight: tl.tensor,
    more: tl.tensor,
    into: tl.tensor,
    sums: tl.tensor,
    num_rows: tl.tensor,
    rows_each: tl.tensor,
    width: tl.constexpr,
    lanes: tl.constexpr,
    adds: tl.constexpr,
) -> None:
    """One program takes some rows: dx = r w g - r^3 / D (sum_d w g x) x, and its part of dw = sum_t r x g."""
    part, lane = tl.program_id(0).to(tl.int64), tl.arange(0, lanes)
    real = lane < width
    factor = tl.load(weight + lane, mask=real, other=0.0).to(tl.float32)
    total = tl.zeros([lanes], tl.float32)
    row = part * rows_each
    end = tl.minimum(row + rows_each, num_rows)
    while row < end:
        given = tl.load(gradient + row * width + lane, mask=real, other=0.0).to(tl.float32)
        values = tl.load(rows + row * width + lane, mask=real, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + row)
        total += given * values * inverse
        scaled = given * factor
        mean = tl.sum(scaled * values, axis=0) * inverse * inverse / width
        result = inverse * (scaled - values * mean)
        if adds:
            result += tl.load(more + row * width + lane, mask=real, other=0.0).to(tl.float32)
        tl.store(into + row * width + lane, result, mask=real)
        row += 1
    tl.store(sums + part * width + lane, total, mask=real)


@triton.jit
def rotate(  # noqa: PLR0913, PLR0917
    heads: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    into: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    angle_stride: tl.tensor,
    into_row: tl.tensor,
    into_head: tl.tensor,
    sign: tl.tensor,
    num_heads: tl.constexpr,
    half: tl.constexpr,
    head_block: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """One program turns all heads of one row: [a, b] becomes [a cos - b sin, b cos + a sin]."""
    row = tl.program_id(0).to(tl.int64)
    head, lane = tl.arange(0, head_block)[:, None], tl.arange(0, lanes)[None, :]
    real = (head < num_heads) & (lane < half)
    cosine = tl.load(cosines + row * angle_stride + lane, mask=lane < half, other=0.0).to(tl.float32)
    sine = tl.load(sines + row * angle_stride + lane, mask=lane < half, other=0.0).to(tl.float32) * sign
    places = heads + row * row_stride + head * head_stride + lane
    first = tl.load(places, mask=real, other=0.0).to(tl.float32)
    second = tl.load(places + half, mask=real, other=0.0).to(tl.float32)
    places = into + row * into_row + head * into_head + lane
    tl.store(places, first * cosine - second * sine, mask=real)
    tl.store(places + half, second * cosine + first * sine, mask=real)


@triton.jit
def _activated(name: tl.constexpr, x: tl.tensor):
    """The value, and the derivative, of an activation."""
    if name == "silu":
        share = 1 / (1 + tl.exp(-x))
        value, slope = x * share, share * (1 + x * (1 - share))
    elif name == "relu":
        value, slope = tl.maximum(x, 0.0), tl.where(x > 0, 1.0, 0.0)
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        bent = 1 - 2 / (tl.exp(2 * inner) + 1)
        value = 0.5 * x * (1 + bent)
        slope = 0.5 * (1 + bent) + 0.5 * x * (1 - bent * bent) * 0.7978845608028654 * (1 + 0.134145 * x * x)
    return value, slope


@triton.jit
def activate(  # noqa: PLR0917
    gates: tl.tensor,
    ups: tl.tensor,
    output: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    width: tl.tensor,
    name: tl.constexpr,
    gated: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program makes a block of a row of a(gates) * ups. The activation is rounded before it is multiplied."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    real = place < width
    gate = tl.load(gates + row * gate_stride + place, mask=real, other=0.0)
    value, _ = _activated(name, gate.to(tl.float32))
    value = value.to(gate.dtype).to(tl.float32)
    if gated:
        value = value * tl.load(ups + row * up_stride + place, mask=real, other=0.0).to(tl.float32)
    tl.store(output + row * width + place, value, mask=real)


@triton.jit
def activate_backward(  # noqa: PLR0913, PLR0917
    gates: tl.tensor,
    ups: tl.tensor,
    gradient: tl.tensor,
    for_ups: tl.tensor,
    opened: tl.tensor,
    count: tl.tensor,
    name: tl.constexpr,
    gated: tl.constexpr,
    opens: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program takes a block: overwrites the gradient of a(gates) * ups with that of the gates."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = place < count
    gate = tl.load(gates + place, mask=real, other=0.0)
    given = tl.load(gradient + place, mask=real, other=0.0).to(tl.float32)
    value, slope = _activated(name, gate.to(tl.float32))
    value = value.to(gate.dtype).to(tl.float32)
    product = value
    if gated:
        up = tl.load(ups + place, mask=real, other=0.0).to(tl.float32)
        tl.store(for_ups + place, given * value, mask=real)
        product = value * up
        given = given * up
    if opens:
        tl.store(opened + place, product, mask=real)
    tl.store(gradient + place, given * slope, mask=real)


@triton.jit
def token_statistics(  # noqa: PLR0917
    scores: tl.tensor,
    targets: tl.tensor,
    normalisers: tl.tensor,
    logprobs: tl.tensor,
    entropies: tl.tensor,
    num_tokens: tl.constexpr,
    block: tl.constexpr,
    wants_entropy: tl.constexpr,
) -> None:
    """One program reads the scores z of one row once: log sum exp z, log p of the target, and the entropy."""
    row = tl.program_id(0).to(tl.int64)
    begin = scores + row * num_tokens
    peak, total, weighted = -float("inf"), 0.0, 0.0
    for start in range(0, num_tokens, block):
        ids = start + tl.arange(0, block)
        z = tl.load(begin + ids, mask=ids < num_tokens, other=-float("inf"))
        higher = tl.maximum(peak, tl.max(z, axis=0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        kept, weights = tl.exp(peak - base), tl.exp(z - base)
        if wants_entropy:
            moved = tl.where(kept == 0, 0.0, weighted + (peak - base) * total)
            weighted = moved * kept + tl.sum(tl.where(weights == 0, 0.0, (z - base) * weights), axis=0)
        total = total * kept + tl.sum(weights, axis=0)
        peak = higher
    normaliser = peak + tl.log(total)
    tl.store(normalisers + row, normaliser)
    target = tl.load(targets + row)
    known = (target >= 0) & (target < num_tokens)
    tl.store(logprobs + row, tl.load(begin + target, mask=known, other=float("nan")) - normaliser)
    if wants_entropy:
        tl.store(entropies + row, tl.log(total) - weighted / total)


@triton.jit
def token_statistics_backward(  # noqa: PLR0917
    scores: tl.tensor,
    targets: tl.tensor,
    normalisers: tl.tensor,
    entropies: tl.tensor,
    of_logprobs: tl.tensor,
    of_entropies: tl.tensor,
    num_tokens: tl.constexpr,
    block: tl.constexpr,
    wants_entropy: tl.constexpr,
) -> None:
    """One program overwrites a block of a row of scores with their gradient."""
    row, ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    real, places = ids < num_tokens, scores + row * num_tokens + ids
    logprob = tl.load(places, mask=real, other=-float("inf")) - tl.load(normalisers + row)
    share = tl.exp(logprob)
    gradient = tl.load(of_logprobs + row) * (tl.where(ids == tl.load(targets + row), 1.0, 0.0) - share)
    if wants_entropy:
        of_entropy = share * (logprob + tl.load(entropies + row))
        gradient -= tl.load(of_entropies + row) * tl.where(share == 0, 0.0, of_entropy)
    tl.store(places, gradient, mask=real)
