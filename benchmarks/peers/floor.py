"""The arithmetic floor of a step: the matrix products of tokens that are not padding, at rates measured here and now.

    python benchmarks/peers/floor.py JOB      measures the rates, and prints them as one line of JSON

A product of the model is timed at its own shapes: as many rows as a minibatch has tokens, for decoding as many as there
are responses; forward, and both of the backward pass. Attention counts the pairs that a causal mask leaves, at the best
of those rates. Nothing else counts: no norm, no softmax, no optimizer, no sampling, no Python. Nothing is computed
twice: the products of a backward pass cost two forward passes, or one where an adapter is trained, whose own products
are left out.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from work import SIZES, Job, Size

MIN_SECONDS = 0.03
"""A product is repeated for so long; the best of `ROUNDS` counts."""
ROUNDS = 5


@dataclass(frozen=True)
class Lengths:
    """Of a step: prompt and response tokens of every sequence, in the order of the job's prompts."""

    prompts: Sequence[int]
    responses: Sequence[int]

    @property
    def whole(self) -> list[int]:
        """Of every sequence."""
        return [prompt + response for prompt, response in zip(self.prompts, self.responses, strict=True)]


def layer_products(size: Size) -> list[tuple[int, int, int]]:
    """(how many, in, out) of one layer."""
    return [
        (2, size.width, size.width),  # query and output
        (2, size.width, size.key_value_width),
        (2, size.width, size.mlp),
        (1, size.mlp, size.width),
    ]


def causal_pairs(lengths: Iterable[int]) -> int:
    """Pairs of tokens in which the second may see the first."""
    return sum(length * (length + 1) // 2 for length in lengths)


@dataclass(frozen=True)
class Rates:
    """Seconds per row of each product, and the best floating-point rate among them."""

    seconds: dict[str, float]
    best: float

    def of(self, kind: str, rows: int, width_in: int, width_out: int) -> float:
        """Seconds of a product with so many rows in all; `kind` is decode, forward or backward."""
        return self.seconds[f"{kind} {width_in}x{width_out}"] * rows


def backbone_seconds(size: Size, rates: Rates, kind: str, tokens: int, pairs: int, *, frozen: bool = False) -> float:
    """All layers, once. Of frozen matrices a backward pass makes no gradient, which is half of its products."""
    products = sum(count * rates.of(kind, tokens, a, b) for count, a, b in layer_products(size)) / (1 + frozen)
    attention = 4 * size.width * pairs / rates.best * (2 if kind == "backward" else 1)
    return size.layers * (products + attention)


def head_seconds(size: Size, rates: Rates, kind: str, rows: int) -> float:
    """The output layer at so many positions."""
    return rates.of(kind, rows, size.width, size.vocabulary)


def floor_seconds(job: Job, lengths: Lengths, rates: Rates) -> dict[str, float]:
    """By phase."""
    size = SIZES[job.size]
    whole, responses = lengths.whole, sum(lengths.responses)
    tokens, pairs = sum(whole), causal_pairs(whole)
    once = list(lengths.prompts)[:: job.group]
    decoded = responses - len(whole)  # the last token of a response goes through no layer
    forward = backbone_seconds(size, rates, "forward", tokens, pairs)
    frozen = job.adapter_rank > 0
    backward = backbone_seconds(size, rates, "backward", tokens, pairs, frozen=frozen)
    head = head_seconds(size, rates, "forward", responses)
    rollout = (
        backbone_seconds(size, rates, "forward", sum(once), causal_pairs(once))
        + backbone_seconds(size, rates, "decode", decoded, pairs - causal_pairs(lengths.prompts))
        + head_seconds(size, rates, "decode", responses)
    )
    models = 1 if job.shared_trunk else 2
    head_backward = head_seconds(size, rates, "backward", responses) / (1 + frozen)
    trained = models * (forward + backward) + head + head_backward
    return {
        "rollout": rollout,
        "scoring": 3 * forward + head,  # reference, value model, reward model
        "training": job.epochs * trained,
    }


def flops(job: Job, lengths: Lengths, *, size: Size | None = None) -> float:
    """Floating-point operations of the same products: a step's, of the job's size or of another."""
    size = size or SIZES[job.size]
    whole, responses = lengths.whole, sum(lengths.responses)
    once = list(lengths.prompts)[:: job.group]
    pairs = causal_pairs(whole)
    forward, head = backbone_flops(size, sum(whole), pairs), 2 * size.width * size.vocabulary * responses
    decoding = backbone_flops(size, responses - len(whole), pairs - causal_pairs(lengths.prompts))
    rollout = backbone_flops(size, sum(once), causal_pairs(once)) + decoding + head
    return rollout + 3 * forward + head + training_flops(job, lengths, size=size)


def training_flops(job: Job, lengths: Lengths, *, size: Size | None = None) -> float:
    """Of the epochs of a step alone."""
    size = size or SIZES[job.size]
    whole = lengths.whole
    head = 2 * size.width * size.vocabulary * sum(lengths.responses)
    products, pairs = backbone_flops(size, sum(whole), 0), backbone_flops(size, 0, causal_pairs(whole))
    models, passes = 1 if job.shared_trunk else 2, 2 if job.adapter_rank else 3
    return job.epochs * (passes * (models * products + head) + 3 * models * pairs)


def backbone_flops(size: Size, tokens: int, pairs: int) -> float:
    """All layers, once, forward."""
    layer = sum(count * a * b for count, a, b in layer_products(size))
    return size.layers * (2 * layer * tokens + 4 * size.width * pairs)


def measure_rates(job: Job, *, decode_rows: int, tokens: int, responses: int) -> Rates:
    """Of this machine, now: products with the rows of a decoding pass and of a minibatch."""
    import torch

    torch.set_num_threads(job.threads)
    size = SIZES[job.size]
    dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
    shapes = {(a, b, tokens) for _, a, b in layer_products(size)} | {(size.width, size.vocabulary, responses)}
    seconds, best = {}, 0.0
    for a, b, rows in sorted(shapes):
        for kind, n in (("decode", decode_rows), ("forward", rows), ("backward", rows)):
            took = _product_seconds(torch.randn(n, a, dtype=dtype), torch.randn(b, a, dtype=dtype), kind)
            seconds[f"{kind} {a}x{b}"] = took / n
            best = max(best, (4 if kind == "backward" else 2) * n * a * b / took)
    return Rates(seconds=seconds, best=best)


def _product_seconds(into: Any, weight: Any, kind: str) -> float:
    """Of a linear layer without bias, or of its backward pass: the gradients for its input and for its weight."""
    if kind != "backward":
        return _best_seconds(lambda: into @ weight.t())
    gradient = into @ weight.t()
    return _best_seconds(lambda: gradient @ weight) + _best_seconds(lambda: gradient.t() @ into)


def _best_seconds(product: Callable[[], Any]) -> float:
    product()
    best = float("inf")
    for _ in range(ROUNDS):
        start, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < MIN_SECONDS:
            product()
            count += 1
        best = min(best, passed / max(count, 1))
    return best


def main() -> None:
    """For the process that compares."""
    job = Job.load(sys.argv[1])
    prompts, responses = job.prompts(), job.response_lengths() or [job.new_tokens]
    mean, response = (sum(map(len, prompts)) / len(prompts)), sum(responses) / len(responses)
    rates = measure_rates(
        job,
        decode_rows=job.num_responses,
        tokens=round(job.minibatch * (mean + response)),
        responses=round(job.minibatch * response),
    )
    print(json.dumps({"seconds": rates.seconds, "best": rates.best}))


if __name__ == "__main__":
    main()
