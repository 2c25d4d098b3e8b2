"""The EOS and end-of-turn token ids of model, tokenizer and chat template."""

from typing import TYPE_CHECKING

from proximo.data.templates.chat import end_of_turn_ids
from proximo.data.tokenise import TextEncoder
from proximo.errors import ModelError
from proximo.models.pretrained.vocabulary import end_of_sequence_ids

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def ending_ids(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """The ids in ascending order. A chat template's end-of-turn token is often not the EOS token.

    Where a turn ends in several special tokens, the last of them ends a response, and none of the others does: training
    teaches them all. Raises ModelError if neither model nor tokenizer defines an EOS token.
    """
    turn = end_of_turn_ids(TextEncoder(tokenizer))
    return tuple(sorted({*end_of_sequence_ids(model, tokenizer), *turn[-1:]} - set(turn[:-1])))


def name_endings(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Let the model's generation config name all of `ending_ids`, so that it ends in other programs where it ends here.

    A model without such a token, or with a chat template that cannot be rendered, is not changed: it may train on plain
    text.
    """
    try:
        ids = ending_ids(model, tokenizer)
    except ModelError:
        return
    if model.generation_config is not None:
        model.generation_config.eos_token_id = list(ids) if len(ids) > 1 else ids[0]
