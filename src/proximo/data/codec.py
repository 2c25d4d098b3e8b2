"""Text and token ids at the boundary of prompt and response: all decoding, and the encoding of a part of a text.

The text of a response is decode(prompt + response) without decode(prompt), for every tokenizer. Decoders treat the
beginning of a text specially (those of sentencepiece models remove a space), so decoding a response alone would change
it: an indented line would lose a space. The text is not cleaned up afterwards.

Some tokenizers put something before every text: those of sentencepiece models a space, by a normaliser (Llama 2,
Mistral 7B) or while they split (Metaspace); byte-level ones may (`add_prefix_space`). That is right before a whole
text, but a response would get a second space, so `PartEncoder` tokenises a part of a text as within the whole.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # transformers takes seconds to import
    from tokenizers import Encoding, Tokenizer
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


class PartEncoder:
    """A tokenizer that puts nothing before a text."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", plain: "Tokenizer") -> None:
        """`plain`: the tokenizer's backend, which puts nothing before a text."""
        self._plain = plain
        self._whole: Tokenizer = tokenizer.backend_tokenizer
        self._added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> Self | None:
        """The encoder; None if the tokenizer puts nothing before a text, or is Python code that cannot be read."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        steps = {
            name: None if step is None else json.loads(step.__getstate__())
            for name, step in (("normalizer", backend.normalizer), ("pre_tokenizer", backend.pre_tokenizer))
        }
        plain = {name: _without_prefix(step) for name, step in steps.items()}
        if plain == steps:
            return None
        from tokenizers import Tokenizer

        copy = Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | plain))
        copy.no_truncation()
        copy.no_padding()
        copy.encode_special_tokens = backend.encode_special_tokens
        return cls(tokenizer, copy)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as they are after other text."""
        encodings = self._plain.encode_batch(list(texts), add_special_tokens=False)
        return [self._ids(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]

    def _ids(self, text: str, encoding: "Encoding") -> list[int]:
        """Ids of a text; from its first special token on those of the tokenizer, which may put its space there."""
        for index, (token, (start, end)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True)):
            # A byte that no other token has is an added token in some vocabularies, but is not spelled out.
            if token in self._added and self._added[token] in text[start:end]:
                return [*encoding.ids[:index], *self._whole.encode(text[start:], add_special_tokens=False).ids]
        return encoding.ids


def _without_prefix(step: Any) -> Any:
    """A normaliser or a pre-tokenizer, in the form of tokenizer.json, that puts nothing before a text."""
    if not isinstance(step, Mapping):
        return step
    changed = dict(step)
    for name in ("normalizers", "pretokenizers"):
        if name in changed:
            changed[name] = [plain for each in changed[name] if (plain := _without_prefix(each)) is not None]
    if changed.get("type") == "Prepend":
        return None
    if changed.get("type") == "Metaspace":
        changed["prepend_scheme"] = "never"
    if "add_prefix_space" in changed:
        changed["add_prefix_space"] = False
    return changed
