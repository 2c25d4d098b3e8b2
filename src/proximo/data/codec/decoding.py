"""Token ids to text: the one place where they are decoded. Not text to ids (`encoding.py`, `tokenise.py`).

The text of a response is decode(prompt + response) without decode(prompt), whatever the tokenizer. Decoded alone, a
response would lose what a decoder does to the beginning of a text: those of sentencepiece models take a space away, so
that an indented line would lose one. Nothing is tidied: the text is what the tokens spell.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"
"""The replacement character, which decoding writes for an incomplete UTF-8 sequence."""
_FEWEST_TOKENS = 4
"""Tokens at the end of a prompt that are tried first."""
_MOST_PARTS = 4
"""Tokens that one character may be spread over: it has at most four bytes."""


def decode(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """The text of a whole sequence."""
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def decode_behind(
    tokenizer: "PreTrainedTokenizerBase",
    before: Sequence[int],
    token_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
) -> str:
    """What the tokens add to the text of those before them.

    A character that they complete is theirs. Bytes that complete none may spoil characters before them; then the text
    is that of the tokens alone.
    """
    first = decode(tokenizer, before, skip_special_tokens=skip_special_tokens)
    whole = decode(tokenizer, (*before, *token_ids), skip_special_tokens=skip_special_tokens)
    if whole.startswith(first) or first.endswith(UNFINISHED):
        return whole[common_length(first, whole) :]
    return decode(tokenizer, token_ids, skip_special_tokens=skip_special_tokens)


def end_of_prompt(tokenizer: "PreTrainedTokenizerBase", prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """A short end of a prompt, behind which a response has the text that it has behind the whole.

    A decoder treats the beginning of a text in its own way (a space is taken away), and joins bytes to characters.
    So what follows an end reads the same as behind the whole prompt if the end has a visible character, which takes the
    beginning upon itself, and does not begin within a character. A prompt without text, such as a lone BOS, is its own
    end: its response begins the text.
    """
    length = _FEWEST_TOKENS
    while length < len(prompt_ids):
        for count in range(length, length + _MOST_PARTS):
            end = tuple(prompt_ids[-count:])
            text = decode(tokenizer, end)
            if text.strip() and not text.startswith(UNFINISHED):
                return end
        length *= 2
    return tuple(prompt_ids)


def response_text(tokenizer: "PreTrainedTokenizerBase", prompt_ids: Sequence[int], response_ids: Sequence[int]) -> str:
    """The text of a response, without special tokens."""
    return decode_behind(tokenizer, end_of_prompt(tokenizer, prompt_ids), response_ids)


def common_length(one: str, other: str) -> int:
    """Length of the common prefix of two strings."""
    if other.startswith(one):
        return len(one)
    differences = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differences, min(len(one), len(other)))
