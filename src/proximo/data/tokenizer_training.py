"""Trains a byte-level BPE tokenizer on given texts, for models that start from random weights."""

from collections.abc import Iterable

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with `<|endoftext|>` (id 0) as beginning and end of sequence; it can encode any text.

    The result depends only on the texts and their order.
    """
    core = ByteLevelBPETokenizer()
    core.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=core._tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
