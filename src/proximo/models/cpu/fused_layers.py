"""Which models run in the functions of `fused.py`, and how: the layers of Llama, Mistral and Qwen2, as they stand.

Not a second model: weights stay where they are, and what has been changed by anyone (an adapter, a hook, a class or
`forward` of one's own, few bits, half precision, dropout) runs as modules. The probe at load holds what is computed
here against the model's own code.
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
"""Of transformers: their layers are h + attention(norm(h)), then h + gated(norm(h)), with rotary positions."""

LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")

WIDE = ({torch.float32}, {torch.float64})
"""Types of all weights together: nothing is cast on the way, as modules cast where types differ."""


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
        """None where the architecture is another, or its modules are not the plain ones of that architecture now.

        Asked before each pass, because adapters, hooks and modes come and go; what was found is remembered with all
        that it depends on.
        """
        kind = type(model)
        if kind.__name__ not in CLASSES or not kind.__module__.startswith("transformers.models."):
            return None
        if torch.is_autocast_enabled(model.device.type) or _is_replaced(model):
            return None
        watched = PART_SCOPE.get() is not _no_scope  # the profiler needs the hooks of modules
        own = [watched, _has_any_global_hook(), model.training, _is_hooked(model)]
        # Not the model itself, which would then be kept for ever.
        state = own + _state(model)
        before = _FOUND.get(model)
        if before is None or before[0] != state:
            before = _FOUND[model] = state, _is_plain_model(model, watched=watched)
        return cls(model) if before[1] else None

    def run(
        self, packed: Packed, layout: AttentionLayout, *, rows: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Hidden states after the final norm: [T, D], or [R, D] for `rows` [R], no one of them twice.

        A cache gets the keys and values of all tokens.
        """
        model = self.model
        hidden = model.embed_tokens(packed.token_ids)
        angles = model.rotary_emb(hidden[None], packed.position_ids[None])
        angles = [each[0, :, None].chunk(2, dim=-1)[0] for each in angles]  # both halves of a head turn by the same

        def attend(attention: Any, heads: Sequence[Tensor]) -> Tensor:
            query, key, value = (each.transpose(0, 1)[None] for each in heads)
            if cache is not None:
                # Copies: what is cached outlives the pass, and as views they would keep the queries as well.
                key, value = (each.clone(memory_format=torch.contiguous_format) for each in (key, value))
                key, value = cache.update(key, value, attention.layer_idx)
            layout.num_calls += 1
            return layout.attend(query, key, value, attention_options(attention))[0].flatten(1)

        layers = model.layers[: model.config.num_hidden_layers]
        for i, layer in enumerate(layers):
            given = (layer, hidden, angles, partial(attend, layer.self_attn))
            asked = rows if i == len(layers) - 1 else None
            if layer.training and layer.gradient_checkpointing:
                hidden = checkpoint(_run_layer, *given, asked, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = _run_layer(*given, asked)
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
        weights = [each.weight for each in (attention.o_proj, norm, gated.gate_proj, gated.up_proj, gated.down_proj)]
        return OutputAndGate.apply(hidden, attended, norm.variance_epsilon, rows, *weights)


_FOUND: WeakKeyDictionary[nn.Module, tuple[list[Any], bool]] = WeakKeyDictionary()


def _state(model: nn.Module) -> list[Any]:
    """All that decides whether modules are plain: what is in them, their code, modes, hooks and types of weights."""
    # Asked before each pass: a generator that calls itself takes a quarter longer.
    found: list[Any] = []
    waiting = list(model._modules.values())
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        own = module.__dict__
        found += (module, type(module), _is_hooked(module), _is_replaced(module))
        found += (own.get("training"), own.get("attention_dropout"))  # a compiled or scripted module keeps no mode
        found += [None if each is None else each.dtype for each in own["_parameters"].values()]
        waiting += own["_modules"].values()
    return found


def _is_plain_model(model: PreTrainedModel, *, watched: bool) -> bool:
    layers, last_norm = list(model.get_submodule("layers").children()), model.get_submodule("norm")
    passed_over = (model, last_norm, *chain.from_iterable(each.modules() for each in layers))
    if not watched and (_has_any_global_hook() or any(map(_is_hooked, passed_over))):
        return False
    if any(map(_is_replaced, passed_over)) or {each.dtype for each in model.parameters()} not in WIDE:
        return False
    home = type(model).__module__
    return type(last_norm).__module__ == home and all(_is_plain(each, home) for each in layers)


def _is_plain(layer: Any, home: str) -> bool:
    """`home`: where the classes of this architecture are defined."""
    modules = dict(layer.named_modules())
    if any(name not in modules or type(modules[name]).__module__ != home for name in ("", "self_attn", "mlp", *NORMS)):
        return False
    if layer.self_attn.training and layer.self_attn.attention_dropout:
        return False
    linear = [modules.get(name) for name in (*LINEAR, *GATED)]
    if any(type(each) is not nn.Linear or not each.weight.is_floating_point() for each in linear):
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
    """True where one module has a `forward` unlike the others of its class: accelerate and kernels put it there."""
    return "forward" in module.__dict__


def attention_options(attention: Any) -> AttentionOptions:
    """As the module passes them: Qwen2 knows its window itself, Mistral reads it off the configuration.

    Llama has none, whatever its configuration says.
    """
    owner = attention.config if type(attention).__name__ == "MistralAttention" else attention
    window = getattr(owner, "sliding_window", None)
    return AttentionOptions(scaling=attention.scaling, sliding_window=window)
