"""Compiles the kernels of CUDA for an H100 that need not be there, and prints their names."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from proximo_cuda import cache_kernels, programs, sampling

NUMBERS = {"epsilon", "scale", "softcap", "sign", "temperature"}
INTEGERS = {
    *("row_stride", "head_stride", "angle_stride", "into_row", "into_head", "gate_stride", "up_stride", "query_row"),
    *("query_head", "key_token", "key_head", "value_token", "value_head", "capacity", "window", "count", "num_rows"),
    "rows_each",
}
IDS = {"streams", "positions", "tokens", "targets", "sources"}
HALVES = {
    *("logits", "query", "key", "value", "keys", "values", "rows", "added", "output", "gradient", "more", "into"),
    *("heads", "gates", "ups", "for_ups", "opened"),
}
SIZES: dict[str, Any] = {
    **{"width": 64, "value_width": 64, "width_block": 64, "value_block": 64, "lanes": 64, "half": 32, "heads": 2},
    **{"num_heads": 14, "head_block": 16, "num_chunks": 2, "key_heads": 2, "group": 7, "group_block": 16, "chunk": 256},
    **{"num_tokens": 1000, "num_parts": 1, "adds": True, "gated": True, "opens": True, "wants_entropy": True},
    **{"has_softcap": True, "has_sinks": True},
}
KERNELS: list[tuple[Any, dict[str, Any]]] = [
    (sampling._weigh, {"block": 1024}),
    (sampling._race, {"block": 1024}),
    (sampling._decide, {}),
    (cache_kernels._put, {}),
    (cache_kernels._attend, {"block": 64}),
    (cache_kernels._add_up, {}),
    (programs.norm, {}),
    (programs.scale, {}),
    (programs.norm_backward, {}),
    (programs.rotate, {}),
    (programs.activate, {"name": "silu", "block": 1024}),
    (programs.activate_backward, {"name": "gelu_tanh", "block": 1024}),
    (programs.token_statistics, {"block": 1024}),
    (programs.token_statistics_backward, {"block": 1024}),
]


def type_of(name: str, kernel: Any) -> str:
    """Of an argument that is no constant."""
    if name in NUMBERS:
        return "fp32"
    if name in INTEGERS or (name == "width" and kernel is programs.activate):
        return "i32"
    if name in IDS or (name == "rows" and kernel in (cache_kernels._put, cache_kernels._attend)):
        return "*i64"
    if name == "winners":
        return "*i32"
    return "*bf16" if name in HALVES else "*fp32"


for kernel, own in KERNELS:
    constant = [each.name for each in kernel.params if each.is_constexpr]
    known = {name: {**SIZES, **own}[name] for name in constant}
    types = {name: "constexpr" if name in known else type_of(name, kernel) for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): size for name, size in known.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=places)
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(kernel.fn.__name__)
