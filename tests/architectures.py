"""One tiny random model per supported architecture, with weights large enough that attention and gaps are real.

Not a fixture: the parity tests of models and engine ask for an architecture by name.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 61
WINDOW = 5
"""Short, so that the sequences of a test are longer than the window."""

LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA_LIKE, "model_type": "llama"},
    "qwen2": {**LLAMA_LIKE, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**LLAMA_LIKE, "model_type": "qwen3", "head_dim": 8},
    "qwen3_moe": {**LLAMA_LIKE, **EXPERTS, "model_type": "qwen3_moe", "head_dim": 8, "norm_topk_prob": True},
    "mistral_window": {**LLAMA_LIKE, "model_type": "mistral", "sliding_window": WINDOW},
    "gemma2": {
        **LLAMA_LIKE,
        **ALTERNATING,
        "model_type": "gemma2",
        "head_dim": 8,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3": {**LLAMA_LIKE, **ALTERNATING, "model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 12},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "scale_attn_by_inverse_layer_idx": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "opt": {
        "model_type": "opt",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    },
    "gpt_neox": {**LLAMA_LIKE, "model_type": "gpt_neox", "tie_word_embeddings": False},
    "phi3": {**LLAMA_LIKE, "model_type": "phi3", "sliding_window": None},
    "olmo2": {**LLAMA_LIKE, "model_type": "olmo2"},
    "smollm3": {**LLAMA_LIKE, "model_type": "smollm3", "no_rope_layers": [1, 0]},
    "mixtral": {**LLAMA_LIKE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        **LLAMA_LIKE,
        **ALTERNATING,
        "model_type": "gpt_oss",
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "phi": {**LLAMA_LIKE, "model_type": "phi", "num_key_value_heads": 4},
    "granite": {
        **LLAMA_LIKE,
        "model_type": "granite",
        "logits_scaling": 3.0,
        "attention_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    },
    "stablelm": {**LLAMA_LIKE, "model_type": "stablelm", "partial_rotary_factor": 0.5},
    "nemotron": {**LLAMA_LIKE, "model_type": "nemotron", "head_dim": 8},
    "persimmon": {**LLAMA_LIKE, "model_type": "persimmon", "num_key_value_heads": 4},
    "cohere": {**LLAMA_LIKE, "model_type": "cohere", "logit_scale": 0.25},
}
"""Arguments of `AutoConfig.for_model` by name."""


def build_architecture(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random causal LM of the architecture, on the CPU, in eval mode, with transformers' own attention."""
    config = AutoConfig.for_model(**ARCHITECTURES[name])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        enlarge_weights(model)
    return wide_norms(model).eval()


class WideNorm(nn.Module):
    """A norm of transformers that computes in float64 where its input is float64, and not in float32 as it does."""

    def forward(self, hidden: Tensor) -> Tensor:
        variance = hidden.square().mean(dim=-1, keepdim=True)
        return self.weight * (hidden * (variance + self.variance_epsilon).rsqrt())


def wide_norms(model: PreTrainedModel) -> PreTrainedModel:
    """In float64, what a model computes by its own code is then good to the last digits, as an oracle should be."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon") and module.weight.dtype == torch.float64:
            # It passes for the norm that it stands for, so that fused layers run in float64 as in float32.
            module.__class__ = type("WideNorm", (WideNorm,), {"__module__": type(module).__module__})
    return model


@torch.no_grad()
def enlarge_weights(model: PreTrainedModel, gain: float = 1.7) -> None:
    """Draw weights so that activations keep their size and attention is far from uniform; biases become non-zero.

    The draw depends on torch's seed and on the order of the parameters. Stacked experts count as matrices.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, dtype=torch.float64)
        if id(parameter) in embeddings:
            parameter.copy_(noise * 0.5)
        elif parameter.dim() >= 2:
            parameter.copy_(noise * gain / math.sqrt(parameter.shape[-1]))
        else:
            parameter.add_((0.2 * noise).to(parameter.dtype))


def random_sequences(lengths: list[int], seed: int = 0, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Token ids drawn without the three special ones at the bottom of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[Tensor] = [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]
    return [tokens.tolist() for tokens in drawn]


OF_SHARED_PREFIXES = ("llama", "qwen2", "qwen3", "gemma2", "gpt2")
"""Those whose gradients with shared prefixes are compared in float64 as well."""


def keep_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of transformers compute in float32 whatever they are given. From now on a float64 stays one."""
    plain = Tensor.to

    def to(tensor: Tensor, *given, **options):
        kept = tensor.dtype is torch.float64 and given[:1] == (torch.float32,)
        return tensor if kept else plain(tensor, *given, **options)

    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "float", lambda tensor: to(tensor, torch.float32))
