"""The section on the sampler in Triton: it draws what torch's operators draw, and how much sooner."""

from functools import partial
from typing import Any

import torch
from gpu.bench import Bench, CannotRun

from proximo.rollout.sampling import plain_draw

ROWS, VOCABULARY = (64, 256), 151_936


def fused_sampler(bench: Bench) -> dict[str, Any]:
    """Tokens of logits in float32 and bf16. Rounding decides fewer than 1 draw in 10,000."""
    if not bench.is_cuda:
        raise CannotRun("needs CUDA")
    from proximo.rollout.fused_sampling import draw, draws_as

    rows = []
    for count in ROWS:
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator(bench.device).manual_seed(0)
            given: dict[str, Any] = {
                "logits": torch.randn(count, VOCABULARY, device=bench.device, generator=generator).mul(3).to(dtype),
                "streams": torch.arange(count, device=bench.device) * 7919,
                "positions": torch.arange(count, device=bench.device),
                "temperature": 1.0,
            }
            name = f"{count} rows in {dtype}"
            bench.hold(draws_as(plain_draw, given["logits"].device, dtype, VOCABULARY), f"{name}: it is not used")
            (tokens, logprobs), (expected, theirs) = draw(**given), plain_draw(**given)
            bench.hold(tokens.equal(expected), f"{name}: {(tokens != expected).sum()} tokens differ")
            bench.hold(
                (away := (logprobs - theirs).abs().max().item()) < 1e-4, f"{name}: log-probs are {away:.2g} away"
            )
            times = {
                kind: bench.median_seconds(partial(each, **given))
                for kind, each in (("plain", plain_draw), ("fused", draw))
            }
            rows.append({"rows": count, "dtype": str(dtype), **{f"{kind}_us": 1e6 * s for kind, s in times.items()}})
    return {"rows": rows}
