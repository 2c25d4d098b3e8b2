"""Tokens that are drawn for rows of the cache, one after the other: what `generate` and sessions have in common."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from proximo.errors import TrainingError
from proximo.kernels import kernels_of
from proximo.models.language import LanguageModel
from proximo.models.packing import send
from proximo.records import Finish
from proximo.rollout.decoding_graphs import DecodingGraphs
from proximo.rollout.sampling import sample
from proximo.rollout.stopping import StopRules

if TYPE_CHECKING:  # transformers takes seconds to import
    from proximo.models.attention.cache import RowCache
    from proximo.models.attention.cache_layouts import RowLayout
    from proximo.models.fast_path import Decoder

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
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Versions of the policy, each with the number of tokens when it took over."""
    finish: Finish | None = None

    @property
    def last_id(self) -> int:
        """What the next token follows."""
        return self.token_ids[-1] if self.token_ids else self.prompt_end[-1]


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
                self._graphs = DecodingGraphs(self._model.base, self._cache, self._pass, capture=capture)
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

    def _pass(self, tokens: Tensor, layout: "RowLayout", streams: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Run the tokens [B], and draw the next ones: tokens [B] and log-probs [B]."""
        hidden = self._made_decoder()(tokens, layout.positions, self._cache, layout)
        return self._sample(self._head.logits(hidden), streams, positions)

    def _draw(self, growing: Sequence[SomeGrowing], logits: Tensor) -> list[SomeGrowing]:
        """Draw one token for each of `growing` from logits [B, V]. Returns those that ended."""
        streams, positions = send(torch.from_numpy(np.array(draw_numbers(growing, 1))), logits.device)
        return self._note(growing, [self._sample(logits, streams, positions)])

    def _sample(self, logits: Tensor, streams: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`sampling.sample` with the options of this call."""
        options = self._stop.options
        return sample(logits, streams=streams, positions=positions, options=options, ending_ids=self._ending_ids)

    def _note(self, growing: Sequence[SomeGrowing], drawn: Sequence[tuple[Tensor, Tensor]]) -> list[SomeGrowing]:
        """Append the drawn tokens. Returns those that ended.

        `drawn`: tokens [B] and log-probs [B] of each pass. Tokens behind an end are dropped. Raises TrainingError if a
        log-prob is not finite.
        """
        for each, tokens, logprobs in zip(growing, *_fetch(drawn), strict=True):
            for token, logprob in zip(tokens, logprobs, strict=True):
                if not math.isfinite(logprob):
                    raise _broken_logits(each)
                each.token_ids.append(token)
                each.logprobs.append(logprob)
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


def _fetch(drawn: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[list[int]], list[list[float]]]:
    """Copy tokens [B] and log-probs [B] of each pass to the host, as one list per row. Waits for the device."""
    num_rows = len(drawn[0][0])
    tokens, logprobs = (torch.cat(passes).tolist() for passes in zip(*drawn, strict=True))
    return [tokens[row::num_rows] for row in range(num_rows)], [logprobs[row::num_rows] for row in range(num_rows)]


def _broken_logits(growing: Growing) -> TrainingError:
    return TrainingError(
        f"the policy gave logits that are not finite for token {len(growing.token_ids)} of {growing.what}; its weights "
        "have probably diverged: resume from an earlier checkpoint with a lower learning rate"
    )
