"""The section on torch's varlen kernel: grouped heads, and fewer queries than keys."""

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
        self.bounds, self.short = (cumulative_lengths([length] * ROWS, device) for length in (LENGTH, 1))
        keys = [each.unflatten(0, (ROWS, LENGTH)).transpose(1, 2).contiguous() for each in self.made[1:]]
        self.cached: list[Tensor] = keys  # [ROWS, KEY_HEADS, LENGTH, HEAD_WIDTH], as decoding has them
        self.bias = torch.zeros(ROWS, 1, 1, LENGTH, device=device, dtype=torch.bfloat16)

    def one_call(self) -> Tensor:
        """Of all sequences."""
        return self.kernel(*self.made, self.bounds, self.bounds, LENGTH, LENGTH, **self.more)

    def loop(self) -> Tensor:
        """One call for each sequence."""
        parts = zip(*(each.transpose(0, 1)[None].split(LENGTH, dim=2) for each in self.made), strict=True)
        done = [scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True)[0] for each in parts]
        return torch.cat(done, dim=1).transpose(0, 1)

    def last_query(self) -> Tensor:
        """One query for each row, which must see the row's last key: decoding, and prompts that are shared."""
        return self.kernel(self.made[0][:ROWS], *self.made[1:], self.short, self.bounds, 1, LENGTH, **self.more)

    def biased(self) -> Tensor:
        """The same with the queries of a group of heads as positions, and a bias that hides nothing."""
        queries = self.made[0][:ROWS].unflatten(1, (KEY_HEADS, HEADS // KEY_HEADS))
        return scaled_dot_product_attention(queries, *self.cached, attn_mask=self.bias).flatten(1, 2)

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
            "last_query_sees_last_key_error": relative(calls.last_query(), calls.biased()),
        }


def _times(bench: Bench, calls: Calls) -> dict[str, float]:
    with torch.no_grad():
        decoding = [1e6 * bench.median_seconds(work, repeats=10) for work in (calls.last_query, calls.biased)]
    training = [1e3 * bench.median_seconds(lambda way=way: calls.gradients(way)) for way in ("one_call", "loop")]
    names = ("decode_one_call_us", "decode_sdpa_with_bias_us", "one_call_ms", "loop_of_64_ms")
    return dict(zip(names, decoding + training, strict=True))
