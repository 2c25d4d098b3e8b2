"""Decodes responses: tokens that are drawn for rows of the cache, one after the other, and the loop of `generate`.

`RowDecoding` is what `generate` and sessions have in common.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from proximo.errors import TrainingError
from proximo.kernels import kernels_of
from proximo.models.language import LanguageModel
from proximo.models.packing import pack, send
from proximo.records import Finish, Prompt, Response, SamplingMask
from proximo.rollout.decoding_graphs import DecodingGraphs
from proximo.rollout.sampling import Drawn, sample
from proximo.rollout.scheduler import Admission, Scheduler
from proximo.rollout.stopping import StopRules, response_of

if TYPE_CHECKING:  # transformers takes seconds to import
    from proximo.models.attention.cache import PromptCache, RowCache
    from proximo.models.attention.cache_layouts import RowLayout
    from proximo.models.fast_path import Decoder

LEAST_SHARED_TOKENS = 8
"""Fewest tokens with which all prompts of a prefill must begin, such as a system message, to be computed once."""
TOKENS_PER_TRANSFER = 8
"""Tokens per row that an accelerator decodes before the host waits for a copy of them.

A response that has ended keeps its row for 3.5 more passes on average: 2% of all passes at 200 tokens each."""


@dataclass(kw_only=True)
class Growing:
    """What the policy writes: a response, or its part in one call of a session."""

    what: str
    """For messages: a response to which prompt."""
    prompt_end: Sequence[int]
    """`end_of_prompt` of what it reads."""
    stream: int
    limit: int
    first_position: int = 0
    """Position of its first draw in the stream."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    allowed: list[np.ndarray] = field(default_factory=list)
    """For each token the ids that it was drawn from; empty unless top_k or top_p leaves tokens out."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Versions of the policy, each with the number of tokens when it took over."""
    finish: Finish | None = None

    @property
    def last_id(self) -> int:
        """What the next token follows."""
        return self.token_ids[-1] if self.token_ids else self.prompt_end[-1]

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """That of its tokens so far."""
        if not self.allowed:
            return None
        return SamplingMask(
            token_ids=torch.from_numpy(np.concatenate(self.allowed, dtype=np.int32)),
            counts=torch.tensor([len(ids) for ids in self.allowed]),
        )


SomeGrowing = TypeVar("SomeGrowing", bound=Growing)


class RowDecoding:
    """Decodes rows of a cache. Its methods that touch the cache run in inference mode."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        cache: "RowCache",
        stop: StopRules,
        prefill_tokens: int,
        version: Callable[[], int],
    ) -> None:
        """`version`: that of the model's weights, which may change between two passes."""
        self._prefill_tokens = prefill_tokens
        self._version_now = version
        self._version = version()
        self._model = model
        self._decoder: Decoder | None = None
        """None until a pass needs it: its cast weights belong to the `casting` of its passes."""
        self._graphs: DecodingGraphs | None = None
        """Of passes with that decoder; None on a device without graphs."""
        self._cache = cache
        self._stop = stop
        ending = sorted({*stop.eos_token_ids, *stop.options.stop_token_ids})
        self._device = model.device  # read once: the property searches the model for a parameter
        self._ending_ids = torch.tensor(ending, dtype=torch.long, device=self._device)
        self._head = model.head

    @property
    def has_stale_cache(self) -> bool:
        """Whether the weights have changed since the keys and values were computed."""
        return self._version != self._version_now()

    def _renew(self) -> None:
        """Go on with the current weights."""
        self._version, self._decoder, self._graphs = self._version_now(), None, None

    def close(self) -> None:
        """Let go of the graphs, which know this object: its cache would stay until cycles are looked for."""
        self._decoder = self._graphs = None

    def _made_decoder(self) -> "Decoder":
        if self._decoder is None:
            self._decoder = self._model.decoder()
            capture = kernels_of(self._device.type).capture(self._device)
            # With a block of one pass the trial would write beyond the room that its rows have.
            if capture is not None and passes_at_once(self._device) > 1:
                self._graphs = DecodingGraphs(
                    self._model.base, self._cache, self._pass, options=self._stop.options, capture=capture
                )
        return self._decoder

    def _decode_rows(self, rows: Sequence[int], growing: Sequence[SomeGrowing]) -> list[SomeGrowing]:
        """Decode a block of tokens, one row for each of `growing`. Returns those that ended."""
        left = max(each.limit - len(each.token_ids) for each in growing)
        count = min(passes_at_once(self._device), left)
        numbers = np.array([[each.last_id for each in growing], *draw_numbers(growing, count)])
        self._made_decoder()
        drawn = None
        if self._graphs is not None:
            drawn = self._graphs.decode(rows, numbers[:3], count=count, passes_left=left)
        if drawn is not None:
            return self._note(growing, drawn)
        tokens, streams, *positions = send(torch.from_numpy(numbers), self._device)
        drawn = []
        for layout, position in zip(self._cache.passes(rows, count), positions, strict=True):
            drawn.append(self._pass(tokens, layout, streams, position))
            tokens = drawn[-1][0]
        return self._note(growing, drawn)

    def _pass(self, tokens: Tensor, layout: "RowLayout", streams: Tensor, positions: Tensor) -> Drawn:
        """Run the tokens [B], and draw the next ones."""
        hidden = self._made_decoder()(tokens, layout.positions, self._cache, layout)
        return self._sample(self._head.logits(hidden), streams, positions)

    def _draw(self, growing: Sequence[SomeGrowing], logits: Tensor) -> list[SomeGrowing]:
        """Draw one token for each of `growing` from logits [B, V]. Returns those that ended."""
        streams, positions = send(torch.from_numpy(np.array(draw_numbers(growing, 1))), logits.device)
        return self._note(growing, [self._sample(logits, streams, positions)])

    def _sample(self, logits: Tensor, streams: Tensor, positions: Tensor) -> Drawn:
        """`sampling.sample` with the options of this call."""
        options = self._stop.options
        return sample(logits, streams=streams, positions=positions, options=options, ending_ids=self._ending_ids)

    def _note(self, growing: Sequence[SomeGrowing], drawn: Sequence[Drawn]) -> list[SomeGrowing]:
        """Append the drawn tokens. Returns those that ended.

        `drawn`: one for each pass. Tokens behind an end are dropped. Raises TrainingError if a log-prob is not finite.
        """
        for each, tokens, logprobs, allowed in zip(growing, *_fetch(drawn), strict=True):
            for token, logprob, among in zip(tokens, logprobs, allowed, strict=True):
                if not math.isfinite(logprob):
                    raise _broken_logits(each)
                each.token_ids.append(token)
                each.logprobs.append(logprob)
                if among is not None:
                    each.allowed.append(among)
                each.finish = self._stop.finish(each.token_ids, prompt_end=each.prompt_end, limit=each.limit)
                if each.finish is not None:
                    break
        return [each for each in growing if each.finish is not None]


def passes_at_once(device: torch.device) -> int:
    """Decoding passes between two copies to the host: 1 on a CPU, which needs no copy."""
    return 1 if device.type == "cpu" else TOKENS_PER_TRANSFER


def draw_numbers(growing: Sequence[Growing], count: int) -> list[list[int]]:
    """The inputs of the next `count` draws of B rows: streams [B], then the positions [B] of each draw."""
    firsts = [each.first_position + len(each.token_ids) for each in growing]
    return [[each.stream for each in growing], *([first + number for first in firsts] for number in range(count))]


def _fetch(drawn: Sequence[Drawn]) -> tuple[list[list[int]], list[list[float]], list[list[np.ndarray | None]]]:
    """Copy what each pass drew to the host, as one list per row. Waits for the device."""
    num_rows = len(drawn[0].tokens)
    tokens, logprobs = (torch.cat(passes).tolist() for passes in zip(*(each[:2] for each in drawn), strict=True))
    allowed = [ids for each in drawn for ids in _ids_of_rows(each)]
    every = range(num_rows)
    return (
        [tokens[row::num_rows] for row in every],
        [logprobs[row::num_rows] for row in every],
        [allowed[row::num_rows] for row in every],
    )


def _ids_of_rows(drawn: Drawn) -> Sequence[np.ndarray | None]:
    """The ids that each of B rows chose among; None where no token was left out."""
    if drawn.allowed is None:
        return [None] * len(drawn.tokens)
    rows, ids = drawn.allowed.nonzero().int().cpu().numpy().T
    return np.split(ids.copy(), np.bincount(rows, minlength=len(drawn.tokens)).cumsum()[:-1])


def _broken_logits(growing: Growing) -> TrainingError:
    return TrainingError(
        f"the policy gave logits that are not finite for token {len(growing.token_ids)} of {growing.what}; its weights "
        "have probably diverged: resume from an earlier checkpoint with a lower learning rate"
    )


@dataclass(kw_only=True)
class GrowingResponse(Growing):
    """A response that is being decoded."""

    prompt: Prompt
    sample_index: int
    response: Response | None = None
    """The finished record; None until the response has ended."""

    def record(self, stop: StopRules) -> Response:
        assert self.finish is not None
        return response_of(
            self.prompt,
            self.sample_index,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish=self.finish,
            versions=self.versions,
            sampling_mask=self.sampling_mask,
            stop=stop,
            prompt_end=self.prompt_end,
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
