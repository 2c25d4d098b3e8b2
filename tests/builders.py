"""Small models and tokenizers made on the spot. Not fixtures: plain functions, so that a test says what it builds."""

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from architectures import wide_norms
from proximo.models.fast_path import FastPath, paths
from proximo.models.precision.placement import Precision

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,!?'\"-:;()\nABCDEFGH"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_language_model(
    model_type: str = "llama",
    *,
    vocab_size: int = 64,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides,
) -> PreTrainedModel:
    """A random causal LM of a few thousand parameters, on the CPU, in eval mode."""
    options = {
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    config = AutoConfig.for_model(model_type, **(options | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return wide_norms(model).eval()


def tiny_model_with_pictures() -> PreTrainedModel:
    """A random model like Gemma 3 of 4 billion parameters and more, which reads pictures beside text."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": 64, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 16, "bos_token_id": 1}
    pictures = {"image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model(
        "gemma3",
        text_config={**sizes, **text, "eos_token_id": 2, "pad_token_id": None},
        vision_config=sizes | pictures,
        mm_tokens_per_image=4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config).eval()


def tiny_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """One token per character, with <unk> 0, <bos> 1, <eos> 2 and role marks; 64 tokens; no pad token."""
    special = ["<unk>", "<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>"]
    vocabulary = {token: index for index, token in enumerate([*special, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("(?m:.)"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=special[3:],
        clean_up_tokenization_spaces=False,
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def run_through_modules(patch: pytest.MonkeyPatch) -> None:
    """Passes in bf16 on a CPU then take the path that accelerators take."""
    patch.setitem(paths(), ("cpu", Precision.BF16), FastPath(bf16_head=True))
