"""What a resumed run must find as it was: data, tokenizer, and the models that no checkpoint holds."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from proximo.config.functions import source_digest
from proximo.config.recipe import Recipe
from proximo.run.build.data import SplitRows
from proximo.run.preflight import inputs_of


def inputs_fingerprint(
    rows: SplitRows, tokenizer: PreTrainedTokenizerBase, models: Mapping[str, nn.Module]
) -> dict[str, Any]:
    """Digests by name; the models as they are built, before a checkpoint is restored into them."""
    digests = {name: model_digest(model) for name, model in models.items()}
    return {"data": rows.fingerprints, "tokenizer": tokenizer_digest(tokenizer), "models": digests}


def function_sources(recipe: Recipe) -> dict[str, str | None]:
    """Of each reward function and verifier of the user's own a hash of the file that it stands in.

    What that file imports is not looked at, nor are functions whose rows are hashed, or that score nothing.
    """
    scoring = [each for each in inputs_of(recipe) if each.key.startswith(("reward.", "gold.")) and ":" in each.name]
    names = sorted({each.name for each in scoring if each.kind in ("function", "verifier")})
    return {name: source_digest(name) for name in names if not name.startswith("proximo.")}


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
