"""One call of `generate` of the built-in engine: its state and its decoding loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proximo.models.language import LanguageModel
from proximo.models.packing import pack
from proximo.records import Prompt, Response
from proximo.rollout.drawing import Growing, RowDecoding
from proximo.rollout.engine import versions_of_tokens
from proximo.rollout.scheduler import Admission, Scheduler
from proximo.rollout.stopping import StopRules

if TYPE_CHECKING:  # transformers takes seconds to import
    from proximo.models.attention.cache import PromptCache, RowCache

LEAST_SHARED_TOKENS = 8
"""Fewest tokens with which all prompts of a prefill must begin, such as a system message, to be computed once."""


@dataclass(kw_only=True)
class GrowingResponse(Growing):
    """A response that is being decoded."""

    prompt: Prompt
    sample_index: int
    response: Response | None = None
    """The finished record; None until the response has ended."""

    def record(self, stop: StopRules) -> Response:
        assert self.finish is not None
        token_versions = versions_of_tokens(self.versions, len(self.token_ids))
        return Response(
            prompt=self.prompt,
            sample_index=self.sample_index,
            token_ids=tuple(self.token_ids),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            response_mask=torch.ones(len(self.token_ids), dtype=torch.bool),
            finish=self.finish,
            policy_version=token_versions[0],
            text=stop.text(self.token_ids, self.finish, prompt_end=self.prompt_end),
            token_versions=token_versions if len(set(token_versions)) > 1 else None,
        )


@dataclass(frozen=True, kw_only=True)
class _ComputedPrompt:
    """A prefilled prompt: its index in the cache of its batch, and the logits of the first response token."""

    cache: "PromptCache"
    index: int
    logits: Tensor  # [V]


class DecodingCall(RowDecoding):
    """The state and the decoding loop of one call of `generate`."""

    def __init__(
        self,
        model: LanguageModel,
        samples: Sequence[Sequence[GrowingResponse]],
        *,
        scheduler: Scheduler,
        cache: "RowCache",
        stop: StopRules,
        prefill_tokens: int,
        version: Callable[[], int],
    ) -> None:
        """`samples[p][s]`: sample `s` of prompt `p`. `version`: that of the model's weights, which may change between
        two passes.
        """
        super().__init__(model, cache=cache, stop=stop, prefill_tokens=prefill_tokens, version=version)
        self._samples = samples
        self._scheduler = scheduler
        self._computed: dict[int, _ComputedPrompt] = {}

    @property
    def done(self) -> bool:
        """Whether every sample has ended."""
        return self._scheduler.done

    def step(self) -> list[GrowingResponse]:
        """Start waiting samples, and decode one block of tokens. Returns the samples that ended."""
        ended = []
        while admissions := self._scheduler.admit():
            ended += self._start(admissions)
        return ended + self._decode()

    # Inference mode saves autograd's bookkeeping. All code that touches the cache runs in it, because inference tensors
    # cannot be changed in place outside of it. Records are made outside: they may enter a loss.
    @torch.inference_mode()
    def _start(self, admissions: Sequence[Admission]) -> list[GrowingResponse]:
        """Prefill new prompts, fill the rows of admitted samples, draw first tokens. Returns the samples that ended."""
        self._prefill([admission.prompt_index for admission in admissions if admission.needs_prefill])
        self._place(admissions)
        rows = [row for admission in admissions for row in admission.rows]
        for row in rows:
            self._in_row(row).versions.append((self._version, 0))
        logits = [
            self._computed[admission.prompt_index].logits.expand(len(admission.rows), -1) for admission in admissions
        ]
        growing = [self._in_row(row) for row in rows]
        ended = self._released(rows, growing, self._draw(growing, torch.cat(logits)))
        for admission in admissions:
            if admission.first_sample + len(admission.rows) == len(self._samples[admission.prompt_index]):
                del self._computed[admission.prompt_index]
        return ended

    def _place(self, admissions: Sequence[Admission]) -> None:
        """Fill their rows, all those at once whose prompts were computed in one pass."""
        by_pass: dict[int, tuple[PromptCache, dict[int, list[int]]]] = {}
        for admission in admissions:
            computed = self._computed[admission.prompt_index]
            _, rows = by_pass.setdefault(id(computed.cache), (computed.cache, {}))
            rows.setdefault(computed.index, []).extend(admission.rows)
        for cache, rows in by_pass.values():
            self._cache.place_all(cache, rows)

    @torch.inference_mode()
    def compute_anew(self) -> None:
        """Compute keys and values again with the current weights: of all responses, and of a prompt with samples left.

        The tokens and their log-probs are kept.
        """
        from proximo.models.attention.cache import PromptCache

        self._renew()
        prompts, self._computed = list(self._computed), {}
        self._prefill(prompts)
        taken = [row for row, slot in enumerate(self._scheduler.rows) if slot is not None]
        while taken:
            # The last token has no keys and values yet: the next pass computes them.
            sequences = [(*self._in_row(row).prompt.token_ids, *self._in_row(row).token_ids[:-1]) for row in taken]
            count = _count_within([len(sequence) for sequence in sequences], limit=self._prefill_tokens)
            packed = pack(sequences[:count], device=self._device)
            cache = PromptCache(packed.lengths)
            self._model.prefill(packed, cache)
            self._cache.place_all(cache, {index: [row] for index, row in enumerate(taken[:count])})
            for row in taken[:count]:
                self._in_row(row).versions.append((self._version, len(self._in_row(row).token_ids)))
            taken = taken[count:]

    def _prefill(self, prompt_indices: Sequence[int]) -> None:
        from proximo.models.attention.cache import PromptCache

        if not prompt_indices:
            return
        prompts = [self._samples[prompt][0].prompt.token_ids for prompt in prompt_indices]
        packed = pack(prompts, shareable=_shared_tokens(prompts), device=self._device)
        cache = PromptCache(packed.lengths, packed.prefixes)
        hidden = self._model.prefill(packed, cache)
        logits = self._head.logits(hidden)
        for index, prompt in enumerate(prompt_indices):
            self._computed[prompt] = _ComputedPrompt(cache=cache, index=index, logits=logits[index])

    @torch.inference_mode()
    def _decode(self) -> list[GrowingResponse]:
        """Remove empty rows and decode a block of tokens for each row. Returns the responses that ended."""
        for move in self._scheduler.compact():
            self._cache.move(move.source, move.target)
        rows = range(len(self._scheduler.rows))
        if not rows:
            return []
        growing = [self._in_row(row) for row in rows]
        return self._released(rows, growing, self._decode_rows(rows, growing))

    def _released(
        self, rows: Sequence[int], growing: Sequence[GrowingResponse], ended: list[GrowingResponse]
    ) -> list[GrowingResponse]:
        """Those that ended, whose rows are now free."""
        self._scheduler.release(row for row, each in zip(rows, growing, strict=True) if each.finish is not None)
        return ended

    def _in_row(self, row: int) -> GrowingResponse:
        slot = self._scheduler.rows[row]
        assert slot is not None
        return self._samples[slot.prompt_index][slot.sample_index]


def _shared_tokens(prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """How many first tokens of each prompt are the same in all; empty if too few to share. The last one is not shared,
    because its hidden state predicts the first token of a response."""
    least, most = min(prompts), max(prompts)  # in alphabetical order, which all others lie between
    same = takewhile(lambda pair: pair[0] == pair[1], zip(least[:-1], most[:-1], strict=False))
    count = min(sum(1 for _ in same), min(map(len, prompts)) - 1)
    return [count] * len(prompts) if count >= LEAST_SHARED_TOKENS else []


def _count_within(lengths: Sequence[int], *, limit: int) -> int:
    """How many sequences, from the first on, have at most `limit` tokens together; at least one."""
    return max(1, sum(total <= limit for total in accumulate(lengths)))
