"""Runs the layers of Llama, Mistral and Qwen2 through the functions of `fused.py`, and decides when that is possible.

The functions read the weights of the model's own modules. A model with any change to its modules (an adapter, a hook, a
class or `forward` of the user's, quantised weights, half precision, dropout) runs as modules. When a model is loaded,
the probe compares the results with the model's own code.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from proximo.models.attention.packed import AttentionLayout, AttentionOptions
from proximo.models.cpu.fused import Norm, OutputAndGate, Projections
from proximo.models.packing import Packed

CLASSES = ("LlamaModel", "MistralModel", "Qwen2Model")
"""transformers classes whose layers are h + attention(norm(h)), then h + swiglu(norm(h)), with rotary embeddings."""

LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")

WIDE = ({torch.float32}, {torch.float64})
"""The allowed sets of dtypes of a model's weights. Modules cast between dtypes; the functions here do not."""


def _no_scope(_: str) -> AbstractContextManager[None]:
    return nullcontext()


PART_SCOPE: ContextVar[Callable[[str], AbstractContextManager[None]]] = ContextVar("part_scope", default=_no_scope)
"""Entered around each part of a layer. The fake-tensor profiler sets it to attribute tensors to parts."""


@dataclass(frozen=True, slots=True)
class FusedLayers:
    """The layers below the head of one model."""

    model: Any
    """The transformers model without its head."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "FusedLayers | None":
        """The fused layers of `model`; None for another architecture, or if one of its modules has been changed.

        Checked before each pass, because adapters, hooks and modes change. The answer is cached together with the state
        of the modules that it depends on.
        """
        architecture = type(model)
        if architecture.__name__ not in CLASSES or not architecture.__module__.startswith("transformers.models."):
            return None
        if torch.is_autocast_enabled(model.device.type) or _is_replaced(model):
            return None
        profiled = PART_SCOPE.get() is not _no_scope  # the profiler adds hooks, which do not rule out fused layers
        own = [profiled, _has_any_global_hook(), model.training, _is_hooked(model)]
        # The state must not contain the model: values that refer to their weak key are never freed.
        state = own + _state(model)
        known = _IS_PLAIN.get(model)
        if known is None or known[0] != state:
            known = _IS_PLAIN[model] = state, _is_plain_model(model, profiled=profiled)
        return cls(model) if known[1] else None

    def run(
        self, packed: Packed, layout: AttentionLayout, *, rows: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Hidden states after the final norm: [T, D], or [R, D] of the distinct flat indices `rows` [R].

        Passes the keys and values of all tokens to `cache`, if there is one.
        """
        model = self.model
        hidden = model.embed_tokens(packed.token_ids)
        angles = model.rotary_emb(hidden[None], packed.position_ids[None])
        # Both halves of a head are rotated by the same angles: [T, 1, K / 2] each of cosines and sines.
        angles = [factors[0, :, None].chunk(2, dim=-1)[0] for factors in angles]

        def attend(attention: Any, heads: Sequence[Tensor]) -> Tensor:
            query, key, value = (states.transpose(0, 1)[None] for states in heads)
            if cache is not None:
                # Copies, because the cache outlives the pass: views would keep the joined tensor with the queries.
                key, value = (states.clone(memory_format=torch.contiguous_format) for states in (key, value))
                key, value = cache.update(key, value, attention.layer_idx)
            layout.num_calls += 1
            return layout.attend(query, key, value, attention_options(attention))[0].flatten(1)

        layers = model.layers[: model.config.num_hidden_layers]
        for i, layer in enumerate(layers):
            inputs = (layer, hidden, angles, partial(attend, layer.self_attn))
            requested = rows if i == len(layers) - 1 else None  # earlier layers need all tokens as keys
            if layer.training and layer.gradient_checkpointing:
                hidden = checkpoint(_run_layer, *inputs, requested, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = _run_layer(*inputs, requested)
        return Norm.apply(hidden, model.norm.weight, model.norm.variance_epsilon)


def _run_layer(
    layer: Any,
    hidden: Tensor,
    angles: Sequence[Tensor],
    attend: Callable[[Sequence[Tensor]], Tensor],
    rows: Tensor | None,
) -> Tensor:
    attention, gated = layer.self_attn, layer.mlp
    linear = (attention.q_proj, attention.k_proj, attention.v_proj)
    attribute_to = PART_SCOPE.get()
    with attribute_to("attention"):
        norm = layer.input_layernorm
        biased = chain.from_iterable((module.weight, module.bias) for module in linear)
        attended = attend(Projections.apply(hidden, norm.weight, norm.variance_epsilon, *angles, *biased))
    with attribute_to("mlp"):
        norm = layer.post_attention_layernorm
        modules = (attention.o_proj, norm, gated.gate_proj, gated.up_proj, gated.down_proj)
        weights = [module.weight for module in modules]
        return OutputAndGate.apply(hidden, attended, norm.variance_epsilon, rows, *weights)


_IS_PLAIN: WeakKeyDictionary[nn.Module, tuple[list[Any], bool]] = WeakKeyDictionary()
"""Model -> state of its modules, and whether they were plain in that state."""


def _state(model: nn.Module) -> list[Any]:
    """Everything that decides if modules are plain: submodules, classes, hooks, modes and dtypes of weights."""
    # Runs before each pass, so it is a loop: a recursive generator takes 25% longer.
    state: list[Any] = []
    pending = list(model._modules.values())
    while pending:
        module = pending.pop()
        if module is None:
            continue
        own = module.__dict__
        state += (module, type(module), _is_hooked(module), _is_replaced(module))
        state += (
            own.get("training"),
            own.get("attention_dropout"),
        )  # compiled and scripted modules have no such attribute
        state += [None if weight is None else weight.dtype for weight in own["_parameters"].values()]
        pending += own["_modules"].values()
    return state


def _is_plain_model(model: PreTrainedModel, *, profiled: bool) -> bool:
    layers, last_norm = list(model.get_submodule("layers").children()), model.get_submodule("norm")
    bypassed = (
        model,
        last_norm,
        *chain.from_iterable(layer.modules() for layer in layers),
    )  # not called by fused layers
    if not profiled and (_has_any_global_hook() or any(map(_is_hooked, bypassed))):
        return False
    if any(map(_is_replaced, bypassed)) or {weight.dtype for weight in model.parameters()} not in WIDE:
        return False
    home = type(model).__module__
    return type(last_norm).__module__ == home and all(_is_plain(layer, home) for layer in layers)


def _is_plain(layer: Any, home: str) -> bool:
    """True if a layer has exactly the modules of Llama, from module `home`, the file of its architecture."""
    modules = dict(layer.named_modules())
    if any(name not in modules or type(modules[name]).__module__ != home for name in ("", "self_attn", "mlp", *NORMS)):
        return False
    if layer.self_attn.training and layer.self_attn.attention_dropout:
        return False
    linear = [modules.get(name) for name in (*LINEAR, *GATED)]
    if any(type(module) is not nn.Linear or not module.weight.is_floating_point() for module in linear):
        return False
    if any(getattr(modules[name], "bias", None) is not None for name in (LINEAR[-1], *GATED)):
        return False
    known = {"", "self_attn", "mlp", "mlp.act_fn", *LINEAR, *GATED, *NORMS}
    activation = modules.get("mlp.act_fn")
    is_silu = type(activation) is nn.SiLU or type(activation).__name__ == "SiLUActivation"
    return modules.keys() == known and is_silu


def _is_hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _is_replaced(module: nn.Module) -> bool:
    """True if this instance has its own `forward`, as the libraries accelerate and kernels set it."""
    return "forward" in module.__dict__


def attention_options(attention: Any) -> AttentionOptions:
    """The options that the attention module would pass itself.

    Qwen2 has its window in the module, Mistral in the configuration. Llama ignores a window in its configuration.
    """
    owner = attention.config if type(attention).__name__ == "MistralAttention" else attention
    window = getattr(owner, "sliding_window", None)
    return AttentionOptions(scaling=attention.scaling, sliding_window=window)
