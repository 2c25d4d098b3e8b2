"""A byte-level BPE tokenizer trained on the texts at hand, for models that start from nothing. Not a loader."""

from collections.abc import Iterable

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with `<|endoftext|>` (id 0) as beginning and end of sequence; any text can be written in it.

    The result depends on the texts and their order alone.
    """
    core = ByteLevelBPETokenizer()
    core.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=core._tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
