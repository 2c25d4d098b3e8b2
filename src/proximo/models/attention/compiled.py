"""Attention as one operator of torch, so that torch.compile takes a layer without a break.

The operator calls the layout of the pass, outside what is compiled: no compiled code depends on the lengths of the
sequences. It keeps nothing, since compiled code reuses the memory of its inputs: its backward pass attends once more.

Legend: B rows of the batch, T tokens, H query heads, H_kv key heads, K head width.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel

from proximo.models.attention.packed import (
    ATTENTION,
    AttentionLayout,
    AttentionOptions,
    check_arguments,
    current_layout,
    layout_attention,
)
from proximo.models.precision.compute import to_compute_type

_ORDINARY = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
"""How torch dispatches outside an operator. Inside, no graph is recorded."""
_LAYOUTS: "WeakValueDictionary[int, AttentionLayout]" = WeakValueDictionary()
"""By their ids, the layouts of the passes whose backward pass is to come."""


def compile_layers(layers: PreTrainedModel, backend: str) -> Callable[..., Any]:
    """The layers as torch.compile runs them: same weights, with shapes left open."""
    AttentionInterface.register(ATTENTION, _attention)
    compiled = torch.compile(layers, backend=backend, dynamic=True)

    def run(**given: Any) -> Any:
        output = compiled(**given)
        output.last_hidden_state = _Holding.apply(output.last_hidden_state, current_layout())
        return output

    return run


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """`layout_attention`, and one operator for torch.compile.

    Layers with dropout in attention are compiled in pieces, because the backward pass would draw anew.
    """
    if not torch.compiler.is_compiling():
        return layout_attention(module, query, key, value, attention_mask, **arguments)
    if arguments.get("dropout"):
        return _not_compiled(module, query, key, value, attention_mask, **arguments)
    check_arguments(module, attention_mask, arguments)
    options = (arguments.get(name) for name in ("scaling", "sliding_window", "softcap"))
    return torch.ops.proximo.attend(query, key, value, arguments.get("s_aux"), *options)[0], None


_not_compiled = torch.compiler.disable(layout_attention)


class _Holding(torch.autograd.Function):
    """Gives back the hidden states. Their graph keeps the layout until the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layout: AttentionLayout) -> Tensor:
        ctx.layout = layout
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@torch.library.custom_op("proximo::attend", mutates_args=())
def _attend(  # noqa: PLR0917 - an operator's inputs
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """query [B, H, T, K], key and value [B, H_kv, T, K] -> [B, T, H, K], and the id of the layout [1]."""
    layout = current_layout()
    assert layout is not None, "compiled layers run inside `attending`"
    _LAYOUTS[id(layout)] = layout
    options = AttentionOptions(scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=sinks)
    layout.num_calls += 1
    return layout.attend(*to_compute_type(query, key, value), options).contiguous(), torch.tensor([id(layout)])


@_attend.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows, heads, tokens = query.shape[:3]
    dtype = to_compute_type(value)[0].dtype
    return value.new_empty((rows, tokens, heads, value.shape[-1]), dtype=dtype), torch.empty(1, dtype=torch.int64)


@torch.library.custom_op("proximo::attend_backward", mutates_args=())
def _attend_backward(  # noqa: PLR0917 - an operator's inputs
    gradient: Tensor,
    layout_id: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> list[Tensor]:
    """The gradients of query, key, value and, where there are any, sinks."""
    layout, given = _LAYOUTS[int(layout_id)], [each for each in (query, key, value, sinks) if each is not None]
    inputs = [each.detach().requires_grad_() for each in given]
    options = AttentionOptions(
        scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=inputs[3] if sinks is not None else None
    )
    with torch.enable_grad(), torch._C._ForceDispatchKeyGuard(*_ORDINARY):
        # In the types of the forward pass, whose context is gone.
        cast = [each.to(gradient.dtype) if each.dtype is torch.float32 else each for each in inputs[:3]]
        output = layout.attend(*cast, options)
        return [each.contiguous() for each in torch.autograd.grad(output, inputs, gradient)]


@_attend_backward.register_fake
def _(_gradient: Tensor, _layout_id: Tensor, *inputs: Any) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in inputs[:4] if each is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    sinks = ctx.saved_tensors[4]
    found = torch.ops.proximo.attend_backward(gradient, *ctx.saved_tensors, *ctx.options)
    return (*found, *([None] if sinks is None else []), None, None, None)


_attend.register_autograd(_backward, setup_context=_save)
