"""Which tokens end an answer: of the model, of the tokenizer, and of the chat template. Not stop strings."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proximo.data.templates.chat import end_of_turn_ids
from proximo.data.tokenise import Encoder
from proximo.models.pretrained.vocabulary import end_of_sequence_ids


def ending_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ascending. A chat template's end of turn is often another token than the end of sequence.

    Raises ModelError where neither model nor tokenizer names an end of sequence.
    """
    return tuple(sorted({*end_of_sequence_ids(model, tokenizer), *end_of_turn_ids(Encoder(tokenizer))}))
