"""Decides which tokens end a response, when it ends, and makes its text.

A response keeps its tokens up to and including the one that ends it. Its text is the text that it adds to its prompt
(`data/codec.py`), without an EOS or stop token, and is cut before a stop string. Stop strings are searched in
decoded text, so they may span several tokens and begin inside one.
Most tokens cannot complete a stop string, and one look-up shows that. For the others a few tokens are decoded, and the
whole response only if the string occurs in them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from proximo.data.codec import UNFINISHED, common_length, decode, decode_behind
from proximo.data.templates.chat import end_of_turn_ids
from proximo.data.tokenise import TextEncoder
from proximo.errors import ModelError
from proximo.models.pretrained.vocabulary import end_of_sequence_ids
from proximo.records import Finish, Prompt, Response, SamplingMask
from proximo.rollout.engine import versions_of_tokens
from proximo.rollout.sampling import SamplingOptions

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CONTEXT_TOKENS = 4
"""Additional tokens decoded in front, because decoding may strip the space of the first token."""
_MOST_PARTS = 4
"""Tokens that one character may be spread over: it has at most four bytes."""


@dataclass(kw_only=True)
class StopRules:
    """Stop rules of one call of the engine. Caches which token ids can complete a stop string.

    `prompt_end` are the tokens before a response: its prompt's tokens, or `end_of_prompt` of them.
    """

    options: SamplingOptions
    eos_token_ids: Collection[int]
    tokenizer: "PreTrainedTokenizerBase"
    _candidates: dict[int, bool] = field(default_factory=dict)

    def finish(self, token_ids: Sequence[int], *, prompt_end: Sequence[int], limit: int) -> Finish | None:
        """Why the response ends with the last of `token_ids`; None if it continues.

        `limit`: number of tokens at which the response is cut.
        """
        if token_ids[-1] in self.eos_token_ids:
            return Finish.EOS
        if token_ids[-1] in self.options.stop_token_ids or self._completes_stop_string(token_ids, prompt_end):
            return Finish.STOP
        if len(token_ids) >= limit:
            return Finish.LENGTH
        return None

    def text(self, token_ids: Sequence[int], finish: Finish, *, prompt_end: Sequence[int]) -> str:
        """The text of a response, without special tokens and the token that ended it, cut before a stop string."""
        if finish.terminated and (token_ids[-1] in self.eos_token_ids or token_ids[-1] in self.options.stop_token_ids):
            return decode_behind(self.tokenizer, prompt_end, token_ids[:-1])
        stopped = finish is Finish.STOP
        cut = self._stop_position(token_ids, prompt_end, skip_special_tokens=True) if stopped else None
        return decode_behind(self.tokenizer, prompt_end, token_ids)[:cut]

    def _completes_stop_string(self, token_ids: Sequence[int], prompt_end: Sequence[int]) -> bool:
        strings = self.options.stop_strings
        if not strings or len(token_ids) < self.options.min_new_tokens or not self._may_complete(token_ids[-1]):
            return False
        # Every token has at least one byte, so this many tokens contain any stop string that ends here.
        window = max(len(string.encode()) for string in strings) + _CONTEXT_TOKENS
        tail = self._tail(token_ids, prompt_end, window)
        if not any(string in tail for string in strings):
            return False
        return self._stop_position(token_ids, prompt_end) is not None

    def _tail(self, token_ids: Sequence[int], prompt_end: Sequence[int], window: int) -> str:
        """The text of the last tokens, from the beginning of a character on; that of all where they are few."""
        for count in range(window, window + _MOST_PARTS):
            if count >= len(token_ids):
                return decode_behind(self.tokenizer, prompt_end, token_ids, skip_special_tokens=False)
            tail = decode(self.tokenizer, token_ids[-count:], skip_special_tokens=False)
            if not tail.startswith(UNFINISHED):
                break
        return tail

    def _may_complete(self, token_id: int) -> bool:
        """False if the text of the token excludes that a stop string ends in it."""
        if token_id not in self._candidates:
            # Decoding may strip the space of the first token, so the second copy shows the full text.
            piece = decode(self.tokenizer, [token_id, token_id], skip_special_tokens=False)
            last = {string[-1] for string in self.options.stop_strings}
            self._candidates[token_id] = UNFINISHED in piece or not last.isdisjoint(piece)
        return self._candidates[token_id]

    def _stop_position(
        self, token_ids: Sequence[int], prompt_end: Sequence[int], *, skip_special_tokens: bool = False
    ) -> int | None:
        """Character index of the earliest stop string that the last token completes; None without one."""
        text, before = (
            decode_behind(self.tokenizer, prompt_end, ids, skip_special_tokens=skip_special_tokens)
            for ids in (token_ids, token_ids[:-1])
        )
        # The last token may change the end of the earlier text: it completes a character or a space is removed. So what
        # it wrote begins where the two texts first differ.
        num_old = common_length(before, text)
        positions = [text.find(string, max(0, num_old - len(string) + 1)) for string in self.options.stop_strings]
        return min((position for position in positions if position >= 0), default=None)


def response_of(
    prompt: Prompt,
    sample_index: int,
    *,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish: Finish,
    versions: Sequence[tuple[int, int]],
    sampling_mask: SamplingMask | None,
    stop: StopRules,
    prompt_end: Sequence[int],
) -> Response:
    """The record of an answer that has ended. `versions`: of the policy, each with the index of its first token."""
    of_tokens = versions_of_tokens(versions, len(token_ids))
    return Response(
        prompt=prompt,
        sample_index=sample_index,
        token_ids=tuple(token_ids),
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        response_mask=torch.ones(len(token_ids), dtype=torch.bool),
        finish=finish,
        policy_version=of_tokens[0],
        text=stop.text(token_ids, finish, prompt_end=prompt_end),
        token_versions=of_tokens if len(set(of_tokens)) > 1 else None,
        sampling_mask=sampling_mask,
    )


def ending_ids(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """The ids in ascending order. A chat template's end-of-turn token is often not the EOS token.

    Where a turn ends in several special tokens, the last of them ends a response, and none of the others does: training
    teaches them all. Raises ModelError if neither model nor tokenizer defines an EOS token.
    """
    turn = end_of_turn_ids(TextEncoder(tokenizer))
    return tuple(sorted({*end_of_sequence_ids(model, tokenizer), *turn[-1:]} - set(turn[:-1])))


def name_endings(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Let the model's generation config name all of `ending_ids`, so that it ends in other programs where it ends here.

    A model without such a token, or with a chat template that cannot be rendered, is not changed: it may train on plain
    text.
    """
    try:
        ids = ending_ids(model, tokenizer)
    except ModelError:
        return
    if model.generation_config is not None:
        model.generation_config.eos_token_id = list(ids) if len(ids) > 1 else ids[0]
