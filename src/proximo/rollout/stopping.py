"""When a response is over, and what its text is. Not which token comes next.

Tokens up to and including the one that ends a response stay; its text leaves out that token, and is cut before a stop
string. Whether a token completes a stop string is decided on text, so the string may lie across tokens, and across
the bytes of one character. Most tokens cannot complete it and cost one look-up; the rest cost the decoding of a few
tokens, and only a hit decodes the whole response.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from proximo.records import Finish
from proximo.rollout.sampling import SamplingOptions

_UNFINISHED = "\ufffd"
"""What decoding writes for a character of which some bytes are missing."""
_CONTEXT_TOKENS = 4
"""Tokens decoded before the ones that matter, since the first token of a text may lose its space."""


@dataclass(kw_only=True)
class StopRules:
    """The rules of one call of the engine. Remembers, per token id, whether it may complete a stop string."""

    options: SamplingOptions
    eos_token_ids: Collection[int]
    tokenizer: PreTrainedTokenizerBase
    _candidates: dict[int, bool] = field(default_factory=dict)

    def finish(self, token_ids: Sequence[int], *, limit: int) -> Finish | None:
        """Why the response so far is over, now that its last token has been drawn; None where it goes on.

        `limit` is the number of tokens at which it is cut.
        """
        if token_ids[-1] in self.eos_token_ids:
            return Finish.EOS
        if token_ids[-1] in self.options.stop_token_ids or self._completes_stop_string(token_ids):
            return Finish.STOP
        if len(token_ids) >= limit:
            return Finish.LENGTH
        return None

    def text(self, token_ids: Sequence[int], finish: Finish) -> str:
        """The response as text, without special tokens, without the token that ended it, cut before a stop string."""
        if finish.terminated and (token_ids[-1] in self.eos_token_ids or token_ids[-1] in self.options.stop_token_ids):
            return self._decode(token_ids[:-1], skip_special_tokens=True)
        cut = self._stop_position(token_ids, skip_special_tokens=True) if finish is Finish.STOP else None
        return self._decode(token_ids, skip_special_tokens=True)[:cut]

    def _completes_stop_string(self, token_ids: Sequence[int]) -> bool:
        strings = self.options.stop_strings
        if not strings or len(token_ids) < self.options.min_new_tokens or not self._may_complete(token_ids[-1]):
            return False
        # No token that counts is shorter than a byte.
        window = max(len(string.encode()) for string in strings) + _CONTEXT_TOKENS
        tail = self._decode(token_ids[-window:])
        if not any(string in tail for string in strings):
            return False
        return self._stop_position(token_ids) is not None

    def _may_complete(self, token_id: int) -> bool:
        """False where the token alone shows that no stop string can end in it. Twice, as its first may lose a space."""
        if token_id not in self._candidates:
            piece = self._decode([token_id, token_id])
            last = {string[-1] for string in self.options.stop_strings}
            self._candidates[token_id] = _UNFINISHED in piece or not last.isdisjoint(piece)
        return self._candidates[token_id]

    def _stop_position(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> int | None:
        """Where in the text the earliest stop string begins that the last token completes."""
        text = self._decode(token_ids, skip_special_tokens=skip_special_tokens)
        before = self._decode(token_ids[:-1], skip_special_tokens=skip_special_tokens)
        # A character that was unfinished, or a space that decoding tidies away, belongs to what the last token wrote.
        num_old = _common_length(before, text)
        found = [text.find(string, max(0, num_old - len(string) + 1)) for string in self.options.stop_strings]
        return min((position for position in found if position >= 0), default=None)

    def _decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)
        return text


def _common_length(one: str, other: str) -> int:
    """How many characters both begin with."""
    differences = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differences, min(len(one), len(other)))
