"""Reads tokenizers, compares them with the vocabularies of models, and grows those."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from proximo.distributed.unread_parameters import Unread, source_of
from proximo.errors import ModelError, memory_ran_out
from proximo.hub import TOKENIZER_FILES, is_local, within_reach
from proximo.models.pretrained.folders import refuse_overlooked, tokenizer_place
from proximo.models.pretrained.sources import first_part, why_unread
from proximo.models.transformers_model import own_randomness

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(path: str, *, revision: str | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder or a Hub name; for an adapter without one, that of its base.

    Raises ModelError if there is none or it cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    path, revision = tokenizer_place(path, revision)
    if is_local(path):
        refuse_overlooked(Path(path))
    try:
        with within_reach(path):
            tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
    except Exception as error:  # tokenizers raise plain Exception for malformed JSON
        if memory_ran_out(error):
            raise
        raise ModelError(f"the tokenizer of {path} cannot be read: {_why_unread(path, error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ModelError(
            f"the tokenizer of {path} is read as a {type(tokenizer).__name__}, which is not a class of transformers: "
            "save it as tokenizer.json"
        )
    return tokenizer


def _why_unread(path: str, error: Exception) -> str:
    why = why_unread(path, error, weights=False)
    if not is_local(path) or why != first_part(error) or (Path(path) / TOKENIZER_FILES[0]).exists():
        return why
    return f"there is no {TOKENIZER_FILES[0]} in it, and of what is there none can be made ({why})"


def vocabulary_size(tokenizer: "PreTrainedTokenizerBase") -> int:
    """One more than the largest token id, added tokens included."""
    return max(tokenizer.get_vocab().values()) + 1


def end_of_sequence_ids(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """All tokens that end an answer, ascending: the generation configuration's (often several) and the tokenizer's.

    Raises ModelError if there are none: no answer could end.
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


def check_vocabulary(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", *, role: str) -> None:
    """Raises ModelError if the tokenizer has ids without an embedding in the model. Spare rows are allowed."""
    refuse_unembedded(tokenizer, embedding_rows(model), role=role, added=())


def refuse_unembedded(
    tokenizer: "PreTrainedTokenizerBase", num_rows: int, *, role: str, added: Collection[str]
) -> None:
    """Raises ModelError if a token has no row in an embedding of `num_rows`, unless it is among `added`."""
    beyond = {token for token, index in tokenizer.get_vocab().items() if index >= num_rows} - set(added)
    if not beyond:
        return
    # Tokens that were put on top of a vocabulary may be meant; a larger vocabulary is that of another model.
    may_be_meant = beyond <= tokenizer.get_added_vocab().keys()
    hint = f", or name {', '.join(sorted(beyond)[:4])} in tokenizer.added_tokens, for which rows are added"
    raise ModelError(
        f"the tokenizer has {vocabulary_size(tokenizer)} tokens, but the {role} model embeds only {num_rows}; take the "
        f"tokenizer that belongs to the model{hint if may_be_meant else ''}"
    )


def check_same_vocabulary(
    tokenizer: "PreTrainedTokenizerBase", own: "PreTrainedTokenizerBase", *, role: str, added: Collection[str] = ()
) -> None:
    """Raises ModelError if the model of `role` was trained with other ids than those of the stage's tokenizer.

    `own` is the tokenizer in the model's folder; `added` are tokens that the stage adds on purpose.
    """
    used, known = tokenizer.get_vocab(), own.get_vocab()
    if used == known:
        return
    names = (used.keys() | known.keys()) - {token for token in added if token not in known}
    differing = sorted(token for token in names if used.get(token) != known.get(token))
    if differing:
        first = differing[0]
        raise ModelError(
            f"the tokenizer is not that of the {role} model: they differ in {len(differing)} tokens, such as {first!r} "
            f"({used.get(first)} in this stage, {known.get(first)} with the model); take the tokenizer that belongs "
            "to the model, or a model with this one. Tokens that are new on purpose go in tokenizer.added_tokens"
        )


@torch.no_grad()
def resize_vocabulary(model: "PreTrainedModel", num_tokens: int) -> None:
    """Grow (never shrink) embedding and output layer in place, before any adapter.

    Every new row is the mean of the old ones, so that all roles agree and no random number is drawn.
    """
    old = embedding_rows(model)
    if num_tokens <= old:
        return
    own = [dict(layer.named_parameters()) for layer in vocabulary_layers(model)]
    with own_randomness(model.device):  # it draws rows that are overwritten below
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
    grown: dict[int, nn.Parameter] = {}
    for layer, before in zip(vocabulary_layers(model), own, strict=True):
        for name, parameter in list(layer.named_parameters()):
            source = source_of(before[name])
            if source is None:
                parameter[old:] = parameter[:old].mean(dim=0)
            else:
                if id(source) not in grown:  # tied layers are read once, and stay one
                    grown[id(source)] = Unread.of(source.grown(num_tokens))
                setattr(layer, name, grown[id(source)])


def embedding_rows(model: "PreTrainedModel") -> int:
    """Token ids that the model can read; may exceed the tokenizer's. Raises ModelError as `vocabulary_layers` does."""
    return vocabulary_layers(model)[0].weight.shape[0]


def vocabulary_layers(model: "PreTrainedModel") -> list[nn.Embedding | nn.Linear]:
    """The embedding and the output layer of a language model. Raises ModelError if an adapter wraps one of them."""
    layers: list[nn.Embedding | nn.Linear] = []
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(layer, nn.Embedding | nn.Linear):
            layers.append(layer)
        elif layer is not None:
            raise ModelError(
                f"a layer of the vocabulary of {type(model).__name__} is a {type(layer).__name__}, where a plain "
                "embedding and a plain linear layer are wanted: merge an adapter on them first (merge_and_unload)"
            )
    return layers


def settle_tying(model: "PreTrainedModel") -> None:
    """Record in the configuration whether embedding and output layer are one matrix.

    A file may hold two where its configuration says one. transformers then runs with two, but a later growth of the
    vocabulary would tie them, and other programs would read one of the two.
    """
    layers = vocabulary_layers(model)
    if len(layers) == 2:
        model.config.tie_word_embeddings = layers[0].weight is layers[1].weight
