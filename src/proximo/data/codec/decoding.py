"""Token ids to text: all decoding happens here.

The text of a response is decode(prompt + response) without decode(prompt), for every tokenizer. Decoders treat the
beginning of a text specially (those of sentencepiece models remove a space), so decoding a response alone would change
it: an indented line would lose a space. The text is not cleaned up afterwards.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"
"""The replacement character, which decoding writes for an incomplete UTF-8 sequence."""
_FEWEST_TOKENS = 4
"""Number of tokens at the end of a prompt that are tried first."""
_MOST_PARTS = 4
"""Most tokens that one character can be split into: it has at most four bytes."""


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
    """The text that the tokens add to the tokens before them.

    It includes a character that they complete. Bytes that complete no character may change the decoded text before
    them; the tokens are then decoded alone.
    """
    first = decode(tokenizer, before, skip_special_tokens=skip_special_tokens)
    whole = decode(tokenizer, (*before, *token_ids), skip_special_tokens=skip_special_tokens)
    if whole.startswith(first) or first.endswith(UNFINISHED):
        return whole[common_length(first, whole) :]
    return decode(tokenizer, token_ids, skip_special_tokens=skip_special_tokens)


def end_of_prompt(tokenizer: "PreTrainedTokenizerBase", prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """The last tokens of a prompt, after which a response decodes as after the whole prompt.

    A decoder treats the beginning of a text specially (it may remove a space), and joins bytes to characters. So a
    response decodes the same after these tokens if they contain a visible character, which is then the beginning, and
    do not start within a character. A prompt without text, for example only a BOS, is returned whole: its response
    begins the text.
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
