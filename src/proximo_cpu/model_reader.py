"""Reads the layers of a transformers model, with the table in `families.py`: which operators they consist of.

A model with anything in it that the table does not name runs as modules. When a model is loaded, the probe compares the
results with the model's own code.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from proximo.models.attention.packed import AttentionOptions
from proximo_cpu.families import Family, family_of
from proximo_cpu.fused_functions import AttentionInputs, OutputAndMLP, distinct_tensors
from proximo_cpu.operators import Activation, Adapter, LayerNorm, Linear, Norm, RMSNorm

_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "GELUActivation": "gelu",
    "GELU": "gelu",
    "ReLU": "relu",
}
"""Class of an activation -> its name in `operators.py`."""


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """One layer of a model."""

    module: Any
    """The layer of the model, which knows whether it is checkpointed."""
    attention: Any
    """Its attention, which knows scaling, window and number."""
    inputs: AttentionInputs
    rest: OutputAndMLP
    angles: str | None
    """The key of its angles in `ModelParts.angles`; None without rotary embeddings."""
    options: AttentionOptions

    @cached_property
    def tensors(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The tensors before and after attention."""
        return self.inputs.tensors, self.rest.tensors

    @property
    def norm_tensors(self) -> tuple[Tensor, ...]:
        """The tensors of its norms."""
        rest, heads = self.rest, self.inputs.head_norms or ()
        return distinct_tensors(self.inputs.norm, *heads, rest.after_attention, rest.before_mlp, rest.after_mlp)


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """A transformers model without its head."""

    embed: Callable[[Tensor, Tensor], Tensor]
    """token_ids [T] and position_ids [T] -> the residual stream before the first layer, [T, D]."""
    rotary: Any
    """The module of rotary embeddings; None without them."""
    angles_by_type: bool
    layers: tuple[LayerParts, ...]
    last_norm: Norm
    finish: nn.Linear | None
    """Applied after the last norm, by a few models of OPT."""

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of angles that its layers take."""
        return tuple(sorted({layer.angles for layer in self.layers if layer.angles is not None}))

    @property
    def norm_tensors(self) -> tuple[Tensor, ...]:
        """The tensors of all norms."""
        of_layers = (tensor for layer in self.layers for tensor in layer.norm_tensors)
        return *of_layers, *distinct_tensors(self.last_norm)

    def angles(self, hidden: Tensor, position_ids: Tensor) -> dict[str | None, tuple[Tensor | None, Tensor | None]]:
        """Cosines and sines [T, 1, K / 2] by the type of a layer; the same ones rotate both halves of a head."""
        found: dict[str | None, tuple[Tensor | None, Tensor | None]] = {None: (None, None)}
        for kind in self.kinds:
            which = (kind,) if self.angles_by_type else ()
            factors = self.rotary(hidden[None], position_ids[None], *which)
            cosines, sines = (each[0, :, None].chunk(2, dim=-1)[0] for each in factors)
            found[kind] = cosines, sines
        return found


def read_parts(model: Any, dtype: torch.dtype, *, narrow_heads: bool = False) -> ModelParts | None:
    """The parts of a model; None if it is not exactly as its family describes it. `dtype`: of products.

    `narrow_heads`: see `AttentionInputs`.
    """
    family = family_of(model)
    if family is None:
        return None
    try:
        return _read(model, family, _Kind(dtype, narrow_heads))
    except UnsupportedLayoutError:
        return None


def bypassed_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model with parts that are not called when its layers run fused."""
    family = family_of(model)
    assert family is not None, "the model has parts"
    owner = model.get_submodule(family.layers.rpartition(".")[0])
    layers = model.get_submodule(family.layers)
    return [model, owner, model.get_submodule(family.last_norm), *layers.modules()]


class UnsupportedLayoutError(Exception):
    """A module is not as the table says, so the model runs as modules."""


def _read(model: Any, family: Family, kind: "_Kind") -> ModelParts:
    home = type(model).__module__
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in ("drop", "dropout"):
        _refuse_dropout(modules.get(name))
    layers = list(modules[family.layers].children())
    layers = layers if family.all_layers else layers[: model.config.num_hidden_layers]
    owner = modules[family.layers.rpartition(".")[0]]
    if getattr(owner, "layerdrop", 0) and owner.training:
        raise UnsupportedLayoutError
    return ModelParts(
        embed=_embedding(modules, family),
        rotary=modules.get("rotary_emb"),
        angles_by_type=family.angles_by_type,
        layers=tuple(_layer(layer, family, home, kind) for layer in layers),
        last_norm=_norm(modules.get(family.last_norm), family, home),
        finish=getattr(owner, "project_out", None),
    )


def _embedding(modules: dict[str, Any], family: Family) -> Callable[[Tensor, Tensor], Tensor]:
    tokens, positions = modules[family.embeddings], modules.get(family.positions or "")
    project = modules.get("decoder.project_in")
    if family.positions is None:
        return lambda token_ids, _: _wide(tokens(token_ids))
    if positions is None:
        raise UnsupportedLayoutError

    def embed(token_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = _wide(tokens(token_ids))
        hidden = hidden if project is None else project(hidden)
        offset = {"position_ids": position_ids} if hasattr(positions, "offset") else {}  # OPT
        return hidden + (positions(None, **offset) if offset else positions(position_ids))

    return embed


def _wide(rows: Tensor) -> Tensor:
    """Of a table that is stored in bfloat16, since the residual stream begins with its rows."""
    return rows.float() if rows.dtype is torch.bfloat16 else rows


class _Kind(NamedTuple):
    dtype: torch.dtype
    narrow_heads: bool


def _layer(layer: Any, family: Family, home: str, kind: _Kind) -> LayerParts:
    modules: dict[str, Any] = dict(_units(layer))
    named = (*family.projections, *family.head_norms, family.output, *family.opened, family.closed, family.activation)
    norms = (family.before_attention, family.after_attention, family.before_mlp, family.after_mlp)
    known = {"", *family.containers, *named, *family.dropouts, *(name for name in norms if name is not None)}
    if modules.keys() != known or any(type(modules[name]).__module__ != home for name in ("", *family.containers)):
        raise UnsupportedLayoutError
    attention = modules[family.attention]
    for name in family.dropouts:
        _refuse_dropout(modules[name])
    for owner in (attention, layer):
        if owner.training and any(getattr(owner, name, 0) for name in ("attention_dropout", "dropout")):
            raise UnsupportedLayoutError
    if getattr(layer, "do_layer_norm_before", True) is False:  # the model of OPT with 350 million weights
        raise UnsupportedLayoutError
    output = _linear(modules[family.output])
    head_width, of_queries = attention.head_dim, output.weight.shape[0 if output.transposed else 1]
    before_attention, after_attention, before_mlp, after_mlp = (
        None if name is None else _norm(modules[name], family, home) for name in norms
    )
    head_norms = [_norm(modules[name], family, home) for name in family.head_norms]
    return LayerParts(
        module=layer,
        attention=attention,
        inputs=AttentionInputs(
            norm=before_attention,
            projections=_projections([_linear(modules[name]) for name in family.projections], of_queries),
            head_norms=None if not head_norms else (_rms(head_norms[0]), _rms(head_norms[1])),
            head_width=head_width,
            dtype=kind.dtype,
            narrow_heads=kind.narrow_heads,
        ),
        rest=OutputAndMLP(
            output=output,
            after_attention=after_attention,
            before_mlp=before_mlp,
            opened=_opened([_linear(modules[name]) for name in family.opened], gated=family.gated),
            activation=_activation(modules[family.activation]),
            closed=_linear(modules[family.closed]),
            after_mlp=after_mlp,
            dtype=kind.dtype,
            narrow_heads=kind.narrow_heads,
        ),
        angles=_angles(attention, family),
        options=_options(attention, family),
    )


def _units(layer: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Names and modules below a layer. A linear layer with an adapter is one module."""
    yield prefix, layer
    for name, module in layer.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if _is_adapted(module):
            yield path, module
        else:
            yield from _units(module, path)


def _angles(attention: Any, family: Family) -> str | None:
    if family.positions is not None or not getattr(attention, "use_rope", True):
        return None
    return attention.layer_type if family.angles_by_type else "all"


def _options(attention: Any, family: Family) -> AttentionOptions:
    """The options that the attention module would pass itself."""
    owner = attention.config if family.window_in_config else attention
    return AttentionOptions(
        scaling=attention.scaling,
        sliding_window=getattr(owner, "sliding_window", None),
        softcap=attention.attn_logit_softcapping if family.softcap else None,
    )


def _refuse_dropout(module: Any) -> None:
    if isinstance(module, nn.Dropout) and module.training and module.p:
        raise UnsupportedLayoutError


def _norm(module: Any, family: Family, home: str) -> Norm:
    if type(module) is nn.LayerNorm:
        return LayerNorm(weight=module.weight, bias=module.bias, epsilon=module.eps)
    if module is None or type(module).__module__ != home or "Norm" not in type(module).__name__:
        raise UnsupportedLayoutError
    epsilon = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return RMSNorm(weight=module.weight, epsilon=epsilon, offset=family.norm_offset)


def _rms(norm: Norm) -> RMSNorm:
    if not isinstance(norm, RMSNorm):
        raise UnsupportedLayoutError
    return norm


def _activation(module: nn.Module) -> Activation:
    name = _ACTIVATIONS.get(type(module).__name__)
    if name is None or type(module).__module__.partition(".")[0] not in ("torch", "transformers"):
        raise UnsupportedLayoutError
    if type(module) is nn.GELU and module.approximate != "none":
        raise UnsupportedLayoutError
    return Activation(name)


def _is_adapted(module: nn.Module) -> bool:
    """True for peft's linear layer with LoRA. Told by its name, because importing peft takes a second."""
    return (type(module).__module__, type(module).__name__) == ("peft.tuners.lora.layer", "Linear")


def _linear(module: Any) -> Linear:
    adapter = None
    if _is_adapted(module):
        adapter = _adapter(module)
        module = module.base_layer
    if type(module) is Conv1D:
        return Linear(weight=module.weight, bias=module.bias, adapter=adapter, transposed=True)
    if type(module) is not nn.Linear or not module.weight.is_floating_point():
        raise UnsupportedLayoutError
    return Linear(weight=module.weight, bias=module.bias, adapter=adapter)


def _adapter(module: Any) -> Adapter | None:
    """The one active adapter of a linear layer; None if adapters are switched off."""
    if module.merged:
        raise UnsupportedLayoutError
    active = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters or not active:
        return None
    name = active[0]
    down, up, dropout = (each[name] for each in (module.lora_A, module.lora_B, module.lora_dropout))
    plain = type(down) is type(up) is nn.Linear and down.bias is up.bias is None
    if len(active) > 1 or not plain or name in module.lora_variant:
        raise UnsupportedLayoutError
    if type(dropout) is not nn.Identity:
        _refuse_dropout(dropout)
    return Adapter(down=down.weight, up=up.weight, scaling=module.scaling[name])


def _projections(layers: list[Linear], of_queries: int) -> tuple[Linear, Linear, Linear]:
    if len(layers) == 1:
        (joint,) = layers
        of_keys, rest = divmod(joint.num_outputs - of_queries, 2)
        if rest:
            raise UnsupportedLayoutError
        ends = (0, of_queries, of_queries + of_keys, of_queries + 2 * of_keys)
        layers = [replace(joint, rows=slice(*ends[i : i + 2])) for i in range(3)]
    query, key, value = layers
    return query, key, value


def _opened(layers: list[Linear], *, gated: bool) -> tuple[Linear, ...]:
    if gated and len(layers) == 1:
        half = layers[0].num_outputs // 2
        return replace(layers[0], rows=slice(0, half)), replace(layers[0], rows=slice(half, 2 * half))
    return tuple(layers)
