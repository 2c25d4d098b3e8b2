"""Runs the layers of a model through the functions of `fused_functions.py`, and decides when that is possible.

The functions read the weights of the model's own modules. A model with any change to its modules (a hook, a class or
`forward` of the user's, quantised weights, dropout) runs as modules. When a model is loaded, the probe
compares the results with the model's own code.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from proximo.models.attention.packed import AttentionLayout
from proximo.models.fast_path import PART_SCOPE
from proximo.models.packing import Packed
from proximo.models.precision.compute import keep_casts_in_recomputation
from proximo_cpu.families import family_of
from proximo_cpu.fused_functions import LastNorm, Projections, Rest, distinct_tensors
from proximo_cpu.library import kernels_for
from proximo_cpu.model_reader import LayerParts, ModelParts, bypassed_modules, read_parts

WIDE = ({torch.float32}, {torch.float64})
"""The allowed sets of dtypes of a model's weights, unless products are in bfloat16."""


@dataclass(frozen=True, slots=True)
class FusedLayers:
    """The layers below the head of one model."""

    model: Any
    """The transformers model without its head."""
    parts: ModelParts

    @classmethod
    def of(cls, model: PreTrainedModel, *, half: bool = False, narrow_heads: bool = False) -> "FusedLayers | None":
        """The fused layers of `model`; None for another architecture, or if one of its modules has been changed.

        `half`: products in bfloat16, of float32 weights or of frozen ones that are stored so. `narrow_heads`: attention
        likewise.

        Checked before each pass, because adapters, hooks and modes change. The answer is cached together with the state
        of the modules that it depends on.
        """
        if family_of(model) is None or torch.is_autocast_enabled(model.device.type) or _is_replaced(model):
            return None
        profiled = PART_SCOPE.get() is not None  # the profiler adds hooks, which do not rule out fused layers
        config = model.config
        own = [half, narrow_heads, profiled, _has_any_global_hook(), model.training, _is_hooked(model)]
        own += [config.num_hidden_layers, getattr(config, "sliding_window", None)]
        # The state must not contain the model: values that refer to their weak key are never freed.
        state = own + _state(model)
        known = _KNOWN.get(model)
        if known is None or known[0] != state:
            known = _KNOWN[model] = state, _parts_of(model, half=half, narrow_heads=narrow_heads, profiled=profiled)
        return None if known[1] is None else cls(model, known[1])

    def run(
        self, packed: Packed, layout: AttentionLayout, *, rows: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Hidden states after the final norm: [T, D], or [R, D] of the distinct flat indices `rows` [R].

        Passes the keys and values of all tokens to `cache`, if there is one.
        """
        parts = self.parts
        hidden = parts.embed(packed.token_ids, packed.position_ids)
        angles = parts.angles(hidden, packed.position_ids)

        def attend(layer: LayerParts, heads: Sequence[Tensor]) -> Tensor:
            query, key, value = (states.transpose(0, 1)[None] for states in heads)
            if cache is not None:
                # Copies, because the cache outlives the pass: views would keep the joined tensor with the queries.
                # Without kernels the modules decode, in the type of products.
                kept = key.dtype if kernels_for(key) is not None else layer.inputs.dtype
                key, value = (states.to(kept, copy=True).contiguous() for states in (key, value))
                captured = cache.update(key, value, layer.attention.layer_idx)
                key, value = (states.to(query.dtype) for states in captured)
            layout.num_calls += 1
            return layout.attend(query, key, value, layer.options)[0].flatten(1)

        for i, layer in enumerate(parts.layers):
            inputs = (layer, hidden, angles[layer.angles], partial(attend, layer))
            requested = rows if i == len(parts.layers) - 1 else None  # earlier layers need all tokens as keys
            if layer.module.training and layer.module.gradient_checkpointing:
                hidden = checkpoint(
                    _run_layer,
                    *inputs,
                    requested,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=keep_casts_in_recomputation,
                )
            else:
                hidden = _run_layer(*inputs, requested)
        hidden = LastNorm.apply(parts.last_norm, hidden, *distinct_tensors(parts.last_norm))
        return hidden if parts.finish is None else parts.finish(hidden)


def _run_layer(
    layer: LayerParts,
    hidden: Tensor,
    angles: tuple[Tensor | None, Tensor | None],
    attend: Callable[[Sequence[Tensor]], Tensor],
    rows: Tensor | None,
) -> Tensor:
    attribute_to, (of_inputs, of_rest) = PART_SCOPE.get() or _no_scope, layer.tensors
    with attribute_to("attention"):
        attended = attend(Projections.apply(layer.inputs, hidden, *angles, *of_inputs))
    with attribute_to("mlp"):
        return Rest.apply(layer.rest, hidden, attended, rows, *of_rest)


def _no_scope(_: str) -> AbstractContextManager[None]:
    return nullcontext()


_KNOWN: WeakKeyDictionary[nn.Module, tuple[list[Any], ModelParts | None]] = WeakKeyDictionary()
"""Model -> state of its modules, and its parts in that state; None where it must run as modules."""


def _state(model: nn.Module) -> list[Any]:
    """Everything that decides if a model runs fused, and of what parts it consists."""
    # Runs before each pass, so it is a loop: a recursive generator takes 25% longer.
    state: list[Any] = []
    pending: list[Any] = list(model._modules.values())
    while pending:
        module = pending.pop()
        if module is None:
            continue
        own = module.__dict__
        # Compiled and scripted modules have no attribute `training` of their own.
        state += (module, type(module), _is_hooked(module), _is_replaced(module), own.get("training"))
        state += [None if weight is None else (id(weight), weight.dtype) for weight in own["_parameters"].values()]
        if "layer_idx" in own:
            state += [own.get(name) for name in _OF_ATTENTION]
        elif "lora_A" in own["_modules"]:
            state += (*module.active_adapters, module.merged, module.disable_adapters, *module.scaling.values())
        elif _OF_OTHERS & own.keys():
            state += [own.get(name) for name in sorted(_OF_OTHERS)]
        pending += own["_modules"].values()
    return state


_OF_ATTENTION = (
    *("layer_idx", "attention_dropout", "dropout", "scaling", "sliding_window", "use_rope"),
    *("attn_logit_softcapping", "head_dim"),
)
"""Attributes of attention modules that parts are made of."""
_OF_OTHERS = {"p", "dropout", "layerdrop", "eps", "variance_epsilon"}
"""Attributes of dropouts, norms and containers that parts depend on."""


def _parts_of(model: PreTrainedModel, *, half: bool, narrow_heads: bool, profiled: bool) -> ModelParts | None:
    """The parts of a model whose modules nobody has changed; None for any other."""
    dtypes = {weight.dtype for weight in model.parameters()}
    narrow = half and dtypes <= {torch.float32, torch.bfloat16}
    if narrow:
        parts = read_parts(model, torch.bfloat16, narrow_heads=narrow_heads)
    else:
        parts = read_parts(model, next(iter(dtypes)))
    if parts is None or not (narrow or dtypes in WIDE):
        return None
    if any(tensor.dtype is torch.bfloat16 for tensor in parts.norm_tensors):
        return None
    bypassed = bypassed_modules(model)
    if not profiled and (_has_any_global_hook() or any(map(_is_hooked, bypassed))):
        return None
    return None if any(map(_is_replaced, bypassed)) else parts


def _is_hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _is_replaced(module: nn.Module) -> bool:
    """True if this instance has its own `forward`, as the libraries accelerate and kernels set it."""
    return "forward" in module.__dict__
