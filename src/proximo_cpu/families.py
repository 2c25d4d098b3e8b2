"""The names of the modules of each architecture: one table. `model_reader.py` reads models by it.

An architecture that is not in the table runs as modules. To add one, add its row: the names of its modules where they
differ from Llama's.
"""

from dataclasses import dataclass, replace

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Family:
    """The names of modules below a layer, and what a class computes that its modules do not show."""

    attention: str = "self_attn"
    projections: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Of queries, keys and values; one name if they are one joint matrix."""
    head_norms: tuple[str, ...] = ()
    """Of queries and of keys."""
    output: str = "self_attn.o_proj"
    opened: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    gated: bool = True
    """True with a single name in `opened`: gate and up are one joint matrix."""
    closed: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    norm_offset: float = 0.0
    """Added to the weights of RMS norms."""
    containers: tuple[str, ...] = ("self_attn", "mlp")
    """Modules of a layer that only hold others."""
    dropouts: tuple[str, ...] = ()
    layers: str = "layers"
    last_norm: str = "norm"
    softcap: bool = False
    """True if attention takes `attn_logit_softcapping` from its module."""
    window_in_config: bool = False
    """True if attention takes its window from the configuration, and not from its module."""
    all_layers: bool = False
    """True if the model runs all its layers, also those beyond the configured number."""
    angles_by_type: bool = False
    """True if the rotary embedding takes the type of a layer."""
    positions: str | None = None
    """A table of positions, added to the embeddings; None for rotary embeddings."""
    embeddings: str = "embed_tokens"


_LLAMA = Family()
_GEMMA2 = Family(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    norm_offset=1.0,
    softcap=True,
)
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")

FAMILIES: dict[str, Family] = {
    "LlamaModel": _LLAMA,
    "MistralModel": replace(_LLAMA, window_in_config=True),
    "Qwen2Model": _LLAMA,
    "Qwen3Model": replace(_LLAMA, head_norms=_HEAD_NORMS),
    "SmolLM3Model": _LLAMA,
    "Olmo2Model": replace(
        _LLAMA,
        head_norms=_HEAD_NORMS,
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    ),
    "Phi3Model": replace(
        _LLAMA,
        projections=("self_attn.qkv_proj",),
        opened=("mlp.gate_up_proj",),
        activation="mlp.activation_fn",
        dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
        window_in_config=True,
    ),
    "Gemma2Model": _GEMMA2,
    "Gemma3TextModel": replace(_GEMMA2, head_norms=_HEAD_NORMS, softcap=False, angles_by_type=True),
    "GPT2Model": Family(
        attention="attn",
        projections=("attn.c_attn",),
        output="attn.c_proj",
        opened=("mlp.c_fc",),
        gated=False,
        closed="mlp.c_proj",
        activation="mlp.act",
        before_attention="ln_1",
        before_mlp="ln_2",
        containers=("attn", "mlp"),
        dropouts=("attn.attn_dropout", "attn.resid_dropout", "mlp.dropout"),
        layers="h",
        last_norm="ln_f",
        all_layers=True,
        positions="wpe",
        embeddings="wte",
    ),
    "OPTModel": Family(
        output="self_attn.out_proj",
        opened=("fc1",),
        gated=False,
        closed="fc2",
        activation="activation_fn",
        before_attention="self_attn_layer_norm",
        before_mlp="final_layer_norm",
        containers=("self_attn",),
        layers="decoder.layers",
        last_norm="decoder.final_layer_norm",
        all_layers=True,
        positions="decoder.embed_positions",
        embeddings="decoder.embed_tokens",
    ),
}
"""Class of the model without its head -> its family."""


def family_of(model: nn.Module) -> Family | None:
    """The family of a model without its head; None for a class that is not in the table or not from transformers."""
    architecture = type(model)
    known = architecture.__module__.startswith("transformers.models.")
    return FAMILIES.get(architecture.__name__) if known else None
