"""Digests that tell a model or a tokenizer from another one under the same name. What a resumed run compares."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase


@torch.no_grad()
def model_digest(module: nn.Module) -> str:
    """SHA-256 over names, types, shapes and every bit of all parameters.

    Several tensors at once: hashing leaves the interpreter's lock. It takes as long as reading the weights does.
    """
    named = list(module.named_parameters())
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        digests = list(pool.map(_tensor_digest, (parameter.detach() for _, parameter in named)))
    whole = hashlib.sha256()
    for (name, parameter), digest in zip(named, digests, strict=True):
        whole.update(f"{name} {parameter.dtype} {tuple(parameter.shape)} {digest}\n".encode())
    return whole.hexdigest()


def _tensor_digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()).hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what decides ids: the vocabulary with its merges, special tokens and the chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    content = {name: part for name, part in content.items() if name not in ("padding", "truncation")}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(json.dumps([content, special, tokenizer.chat_template], sort_keys=True).encode()).hexdigest()
