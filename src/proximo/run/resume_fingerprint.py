"""Digests of what must be unchanged on resume: data, tokenizer, and models that checkpoints do not hold."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from proximo import session_functions
from proximo.config.functions import source_digest
from proximo.config.recipe import Recipe
from proximo.distributed.unread_parameters import numbers_of
from proximo.distributed.world import current
from proximo.run.make.data import SplitRows
from proximo.run.preflight import inputs_of


def inputs_fingerprint(
    rows: SplitRows, tokenizer: PreTrainedTokenizerBase, models: Mapping[str, nn.Module]
) -> dict[str, Any]:
    """Name -> digest. Call it before a checkpoint is restored into the models."""
    digests = current().once(
        lambda: {name: model_digest(model) for name, model in models.items()}, what="the digests of models"
    )
    return {"data": rows.fingerprints, "tokenizer": tokenizer_digest(tokenizer), "models": digests}


def function_sources(recipe: Recipe) -> dict[str, str | None]:
    """User-defined reward function or verifier -> hash of the file that defines it.

    Imports of that file are not followed. Data functions are left out, since their rows are hashed.
    """
    scoring = [each for each in inputs_of(recipe) if each.key.startswith(("reward.", "gold.")) and ":" in each.name]
    names = sorted({each.name for each in scoring if each.kind in ("function", "verifier")})
    return {
        name: source_digest(name)
        for name in names
        if not name.startswith("proximo.") or name.startswith(session_functions.MODULE)
    }


@torch.no_grad()
def model_digest(module: nn.Module) -> str:
    """SHA-256 over names, types, shapes and every bit of all parameters, also of those still in their files.

    Tensors are hashed in parallel, because hashing releases the interpreter's lock.
    """
    named = list(module.named_parameters())
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        digests = list(pool.map(_tensor_digest, (parameter for _, parameter in named)))
    whole = hashlib.sha256()
    for (name, parameter), digest in zip(named, digests, strict=True):
        whole.update(f"{name} {parameter.dtype} {tuple(parameter.shape)} {digest}\n".encode())
    return whole.hexdigest()


def _tensor_digest(tensor: Tensor) -> str:
    return hashlib.sha256(numbers_of(tensor).cpu().contiguous().flatten().view(torch.uint8).numpy()).hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of everything that determines token ids: vocabulary, merges, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    content = {name: part for name, part in content.items() if name not in ("padding", "truncation")}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(json.dumps([content, special, tokenizer.chat_template], sort_keys=True).encode()).hexdigest()
