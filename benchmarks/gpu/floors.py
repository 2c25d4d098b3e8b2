"""What a device allows: bytes of decoding at the rate of a copy, products of training at that of a large product."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from floor import Lengths, layer_products, training_flops
from gpu.bench import Bench
from stopwatch import PHASES
from work import SIZES, Job, Size

BF16_BYTES = 2


def decode_bytes(size: Size, lengths: Lengths) -> float:
    """That a rollout must read: all weights for each pass, and what a row has of keys and values at each of its own.

    There are as many passes as the longest response has tokens; the first is that of the prompts, which reads no keys.
    """
    weights = size.layers * sum(count * a * b for count, a, b in layer_products(size)) + size.width * size.vocabulary
    per_token = 2 * size.layers * size.key_value_width
    seen = sum(
        (response - 1) * prompt + response * (response - 1) // 2
        for prompt, response in zip(lengths.prompts, lengths.responses, strict=True)
    )
    return BF16_BYTES * (max(lengths.responses) * weights + per_token * seen)


def bandwidth(bench: Bench, *, num_bytes: int) -> float:
    """Bytes per second, read and written, of a copy of so many."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / bench.median_seconds(lambda: target.copy_(source), repeats=5)


def product_rate(bench: Bench, dtype: torch.dtype, *, width: int) -> float:
    """Operations per second of a square product."""
    a, b = (torch.randn(width, width, dtype=dtype, device=bench.device) for _ in range(2))
    return 2 * width**3 / bench.median_seconds(lambda: a @ b, repeats=5)


def shares(job: Job, steps: Sequence[Mapping[str, Any]], rates: Mapping[str, float]) -> dict[str, float]:
    """Of a side's steps, the median of each: seconds by phase and of the step, decoding against its floor, MFU.

    A step has the seconds of `PHASES` and `lengths`, the tokens of its responses.
    """
    prompts = [len(prompt) for prompt in job.prompts() for _ in range(job.group)]
    rows = []
    for step in steps:
        lengths = Lengths(prompts, step["lengths"])
        tokens, seconds = sum(lengths.responses), {phase: step[phase] for phase in PHASES}
        floor = decode_bytes(SIZES[job.size], lengths) / rates["bytes_per_second"]
        rows.append(
            seconds
            | {
                "step": sum(seconds.values()),
                "decode_tokens_per_second": tokens / seconds["rollout"],
                "share_of_bandwidth_floor": floor / seconds["rollout"],
                "mfu": training_flops(job, lengths) / seconds["training"] / rates["bf16"],
                "response_tokens": tokens,
            }
        )
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}
