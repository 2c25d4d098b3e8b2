"""Tokenises a part of a text as within the whole, for tokenizers that put something before every text.

Those of sentencepiece models put a space there, by a normaliser (Llama 2, Mistral 7B) or while they split (Metaspace);
byte-level ones may (`add_prefix_space`). That is right before a whole text, but a response would get a second space.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from tokenizers import Encoding, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PartEncoder:
    """A tokenizer that puts nothing before a text."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", plain: Tokenizer) -> None:
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
        copy = Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | plain))
        copy.no_truncation()
        copy.no_padding()
        copy.encode_special_tokens = backend.encode_special_tokens
        return cls(tokenizer, copy)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as they are after other text."""
        encodings = self._plain.encode_batch(list(texts), add_special_tokens=False)
        return [self._ids(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]

    def _ids(self, text: str, encoding: Encoding) -> list[int]:
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
