"""The section on torch's varlen kernel: grouped heads in training."""

import inspect
import traceback
from typing import Any

import torch
from gpu.bench import Bench, CannotRun
from gpu.made import relative
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from proximo.models.packing import cumulative_lengths

ROWS, LENGTH, HEADS, KEY_HEADS, HEAD_WIDTH = 64, 384, 14, 2, 64


class Calls:
    """The same attention by several ways. Queries, keys and values are [ROWS * LENGTH, heads, HEAD_WIDTH] in bf16."""

    def __init__(self, device: torch.device) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self.kernel: Any = varlen_attn
        self.parameters = inspect.signature(varlen_attn).parameters
        self.more = {"window_size": (-1, 0), **({"enable_gqa": True} if "enable_gqa" in self.parameters else {})}
        self.made = [
            torch.randn(ROWS * LENGTH, heads, HEAD_WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        ]
        self.bounds = cumulative_lengths([LENGTH] * ROWS, device)

    def one_call(self) -> Tensor:
        """Of all sequences."""
        return self.kernel(*self.made, self.bounds, self.bounds, LENGTH, LENGTH, **self.more)

    def loop(self) -> Tensor:
        """One call for each sequence."""
        parts = zip(*(each.transpose(0, 1)[None].split(LENGTH, dim=2) for each in self.made), strict=True)
        done = [scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True)[0] for each in parts]
        return torch.cat(done, dim=1).transpose(0, 1)

    def gradients(self, way: str) -> tuple[Tensor, ...]:
        """Of queries, keys and values."""
        return torch.autograd.grad(getattr(self, way)().sum(), self.made)


def attention(bench: Bench) -> dict[str, Any]:
    """torch's varlen kernel beside one call for each sequence. What Proximo takes of it must be right."""
    if not bench.is_cuda:
        raise CannotRun("needs CUDA")
    calls = Calls(torch.device(bench.device))
    found: dict[str, Any] = {"parameters": sorted(calls.parameters)}
    try:
        found |= _errors(calls) | _times(bench, calls)
    except (RuntimeError, TypeError, ValueError):
        found["failed"] = traceback.format_exc()[-800:]
    bench.hold("failed" not in found, "the kernel that Proximo takes fails")
    for name in [name for name in found if name.endswith("_error")]:
        bench.hold(found[name] < 0.01, f"{name} of the kernel that Proximo takes is {found[name]:.2g}")
    return found


def _errors(calls: Calls) -> dict[str, float]:
    ours, exact = calls.gradients("one_call"), calls.gradients("loop")
    with torch.no_grad():
        return {
            "gqa_error": relative(calls.one_call(), calls.loop()),
            "gqa_gradient_error": relative(ours[1], exact[1]),
        }


def _times(bench: Bench, calls: Calls) -> dict[str, float]:
    training = [1e3 * bench.median_seconds(lambda way=way: calls.gradients(way)) for way in ("one_call", "loop")]
    return dict(zip(("one_call_ms", "loop_of_64_ms"), training, strict=True))
