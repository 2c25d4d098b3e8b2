"""Digests that tell a model or a tokenizer from another one under the same name. What a resumed run compares."""

import hashlib
import json

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

VALUES_PER_TENSOR = 64


@torch.no_grad()
def model_digest(module: nn.Module) -> str:
    """SHA-256 of the names, types and shapes of all parameters, and of at most 64 values of each, spread evenly.

    Training moves nearly every weight, so a model that was trained further, or another one, has another digest; to
    read all bytes of a large model at each start would cost minutes.
    """
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        flat = parameter.detach().flatten()
        stride = max(1, flat.numel() // VALUES_PER_TENSOR)
        digest.update(flat[::stride].to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what decides ids: the vocabulary with its merges, special tokens and the chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    content = {name: part for name, part in content.items() if name not in ("padding", "truncation")}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(json.dumps([content, special, tokenizer.chat_template], sort_keys=True).encode()).hexdigest()
