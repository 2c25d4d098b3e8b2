"""Decides when a response ends, and makes its text.

A response keeps its tokens up to and including the one that ends it. Its text omits an EOS or stop token, and is cut
before a stop string. Stop strings are searched in decoded text, so they may span several tokens and begin inside one.
Most tokens cannot complete a stop string, which one look-up tells. For the others a few tokens are decoded, and the
whole response only if the string occurs in them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proximo.records import Finish
from proximo.rollout.sampling import SamplingOptions

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"
"""The replacement character, which decoding writes for an incomplete UTF-8 sequence."""
_CONTEXT_TOKENS = 4
"""Additional tokens decoded in front, because decoding may strip the space of the first token."""


@dataclass(kw_only=True)
class StopRules:
    """Stop rules of one call of the engine. Caches which token ids can complete a stop string."""

    options: SamplingOptions
    eos_token_ids: Collection[int]
    tokenizer: "PreTrainedTokenizerBase"
    _candidates: dict[int, bool] = field(default_factory=dict)

    def finish(self, token_ids: Sequence[int], *, limit: int) -> Finish | None:
        """Why the response ends with the last of `token_ids`; None if it continues.

        `limit`: number of tokens at which the response is cut.
        """
        if token_ids[-1] in self.eos_token_ids:
            return Finish.EOS
        if token_ids[-1] in self.options.stop_token_ids or self._completes_stop_string(token_ids):
            return Finish.STOP
        if len(token_ids) >= limit:
            return Finish.LENGTH
        return None

    def text(self, token_ids: Sequence[int], finish: Finish) -> str:
        """The text of a response, without special tokens and the token that ended it, cut before a stop string."""
        if finish.terminated and (token_ids[-1] in self.eos_token_ids or token_ids[-1] in self.options.stop_token_ids):
            return self._decode(token_ids[:-1], skip_special_tokens=True)
        cut = self._stop_position(token_ids, skip_special_tokens=True) if finish is Finish.STOP else None
        return self._decode(token_ids, skip_special_tokens=True)[:cut]

    def _completes_stop_string(self, token_ids: Sequence[int]) -> bool:
        strings = self.options.stop_strings
        if not strings or len(token_ids) < self.options.min_new_tokens or not self._may_complete(token_ids[-1]):
            return False
        # Every token has at least one byte, so this many tokens contain any stop string that ends here.
        window = max(len(string.encode()) for string in strings) + _CONTEXT_TOKENS
        tail = self._decode(token_ids[-window:])
        if not any(string in tail for string in strings):
            return False
        return self._stop_position(token_ids) is not None

    def _may_complete(self, token_id: int) -> bool:
        """False if the text of the token excludes that a stop string ends in it."""
        if token_id not in self._candidates:
            # Decoding may strip the space of the first token, so the second copy shows the full text.
            piece = self._decode([token_id, token_id])
            last = {string[-1] for string in self.options.stop_strings}
            self._candidates[token_id] = _UNFINISHED in piece or not last.isdisjoint(piece)
        return self._candidates[token_id]

    def _stop_position(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> int | None:
        """Character index of the earliest stop string that the last token completes; None without one."""
        text = self._decode(token_ids, skip_special_tokens=skip_special_tokens)
        before = self._decode(token_ids[:-1], skip_special_tokens=skip_special_tokens)
        # The last token may change the end of the earlier text: it completes a character or a space is removed. So what
        # it wrote begins where the two texts first differ.
        num_old = _common_length(before, text)
        positions = [text.find(string, max(0, num_old - len(string) + 1)) for string in self.options.stop_strings]
        return min((position for position in positions if position >= 0), default=None)

    def _decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)
        return text


def _common_length(one: str, other: str) -> int:
    """Length of the common prefix of two strings."""
    differences = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differences, min(len(one), len(other)))
