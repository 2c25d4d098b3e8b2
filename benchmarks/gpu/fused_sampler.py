"""The section on the sampler in Triton: it draws what torch's operators draw, and how much sooner."""

from functools import partial
from itertools import product
from typing import Any

import torch
from gpu.bench import Bench, CannotRun

from proximo.rollout.sampling import plain_draw

ROWS, VOCABULARY = (64, 256), 151_936


def fused_sampler(bench: Bench) -> dict[str, Any]:
    """Tokens of logits in float32 and bf16. Rounding decides fewer than 1 draw in 10,000."""
    if not bench.is_cuda:
        raise CannotRun("needs CUDA")
    from proximo_cuda.sampling import draw, draws_as

    rows = []
    for count, dtype in product(ROWS, (torch.float32, torch.bfloat16)):
        numbers, generator = torch.arange(count, device=bench.device), torch.Generator(bench.device).manual_seed(0)
        logits = torch.randn(count, VOCABULARY, device=bench.device, generator=generator).mul(3).to(dtype)
        given: dict[str, Any] = {"logits": logits, "streams": numbers * 7919, "positions": numbers, "temperature": 1.0}
        name = f"{count} rows in {dtype}"
        bench.hold(draws_as(plain_draw, logits.device, dtype, VOCABULARY), f"{name}: it is not used")
        (tokens, logprobs), (expected, theirs) = draw(**given), plain_draw(**given)
        away = (logprobs - theirs).abs().max().item()
        bench.hold(tokens.equal(expected), f"{name}: {(tokens != expected).sum()} tokens differ")
        bench.hold(away < 1e-4, f"{name}: log-probs are {away:.2g} away")
        plain, fused = (1e6 * bench.median_seconds(partial(each, **given)) for each in (plain_draw, draw))
        rows.append({"rows": count, "dtype": str(dtype), "plain_us": plain, "fused_us": fused})
    return {"rows": rows}
