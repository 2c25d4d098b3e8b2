"""Tokenizers and the vocabularies of models: reading, comparing, growing. Not the tokenising of data."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from proximo.errors import ModelError
from proximo.failures import memory_ran_out
from proximo.models.randomness import own_randomness
from proximo.models.sources import first_part, is_local, not_here


def load_tokenizer(path: str, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """From a folder or a Hub name. Raises ModelError where there is none or it cannot be read."""
    if is_local(path):
        folder = Path(path)
        if not folder.is_dir():
            raise ModelError(f"there is no folder {path}; give a tokenizer's folder, or a Hub name such as owner/name")
        names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model", "spiece.model")
        if not any((folder / name).is_file() for name in names):
            raise ModelError(f"{path} holds no tokenizer: neither tokenizer.json nor tokenizer_config.json is in it")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
    except Exception as error:  # tokenizers raise plain Exception for malformed JSON
        if memory_ran_out(error):
            raise
        raise ModelError(f"the tokenizer of {path} cannot be read: {first_part(error)}{not_here(path)}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def decode_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of one sequence, without special tokens."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest token id, added tokens included."""
    return max(tokenizer.get_vocab().values()) + 1


def end_of_sequence_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All tokens that end an answer, ascending: the generation configuration's (often several) and the tokenizer's.

    Raises ModelError where there is none: no answer could ever end.
    """
    listed = None if model.generation_config is None else model.generation_config.eos_token_id
    ids = set(listed if isinstance(listed, list) else [listed]) | {tokenizer.eos_token_id}
    ids.discard(None)
    if not ids:
        raise ModelError(
            "neither the tokenizer nor the model's generation config names an end-of-sequence token, so no answer "
            "could end; set eos_token in the tokenizer"
        )
    return tuple(sorted(ids))


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, role: str) -> None:
    """Raises ModelError where the tokenizer has ids that the model has no embedding for. Spare rows are allowed."""
    wanted, rows = vocabulary_size(tokenizer), embedding_rows(model)
    if wanted > rows:
        raise ModelError(
            f"the tokenizer has {wanted} tokens, but the {role} model embeds only {rows}; take the tokenizer that "
            "belongs to the model, or let SFT add the tokens, which resizes every role"
        )


def check_same_vocabulary(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, *, role: str) -> None:
    """Raises ModelError where the model of `role` reads other ids than the policy writes."""
    mine, theirs = tokenizer.get_vocab(), other.get_vocab()
    if mine == theirs:
        return
    differing = sorted(token for token in mine.keys() | theirs.keys() if mine.get(token) != theirs.get(token))
    raise ModelError(
        f"the {role} model must share the policy's vocabulary, but {len(differing)} of its tokens differ, such as "
        f"{differing[0]!r} ({mine.get(differing[0])} for the policy, {theirs.get(differing[0])} for the {role} model)"
    )


@torch.no_grad()
def resize_vocabulary(model: PreTrainedModel, num_tokens: int) -> None:
    """Grow (never shrink) embedding and output layer in place, before any adapter.

    Every new row is the mean of the old ones, so that all roles agree and no random number is drawn.
    """
    old = embedding_rows(model)
    if num_tokens <= old:
        return
    with own_randomness(model.device):  # it draws rows that are overwritten below
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if layer is None:
            continue
        assert isinstance(layer, nn.Embedding | nn.Linear)
        layer.weight[old:] = layer.weight[:old].mean(dim=0)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            layer.bias[old:] = layer.bias[:old].mean()


def embedding_rows(model: PreTrainedModel) -> int:
    """Token ids that the model can read; may exceed the tokenizer's."""
    layer = model.get_input_embeddings()
    assert isinstance(layer, nn.Embedding)
    return layer.num_embeddings
