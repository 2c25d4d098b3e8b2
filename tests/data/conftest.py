"""Tokenizers for the tests of data: the tiny one always, the real ones where the real data is at hand."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from builders import tiny_tokenizer
from chat_families import PLAIN_CHAT_TEMPLATE
from real_data import real_data


@pytest.fixture(scope="session")
def real_tokenizers() -> dict[str, PreTrainedTokenizerBase]:
    """Qwen2.5 with its own chat template; GPT-2 and a BPE of 2,000 tokens with the plain one."""
    folder = real_data("tokenizers")
    gpt2 = AutoTokenizer.from_pretrained(folder / "gpt2")
    tiny_bpe = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tiny_bpe" / "tiny_bpe_tokenizer.json"), eos_token="<|endoftext|>"
    )
    gpt2.chat_template = tiny_bpe.chat_template = PLAIN_CHAT_TEMPLATE
    return {"qwen2.5": AutoTokenizer.from_pretrained(folder / "qwen2.5"), "gpt2": gpt2, "tiny_bpe": tiny_bpe}


@pytest.fixture(params=["tiny", "qwen2.5", "gpt2", "tiny_bpe"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    """Each tokenizer in turn; the real ones skip where they are not at hand."""
    if request.param == "tiny":
        return tiny_tokenizer()
    return request.getfixturevalue("real_tokenizers")[request.param]
