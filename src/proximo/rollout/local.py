"""The built-in engine: continuous batching over the rows of one key-value cache, in the trainer's process.

Each prompt is prefilled once for all its samples, packed with other prompts without padding. Each decoding pass then
draws one token per row. A response that ends frees its row at once for the next sample. Logits are computed for the
last position only. On an accelerator, a block of several tokens is decoded before the host reads them. Tokens that a
row wrote past the end of its response are then discarded, so responses do not depend on the size of the block.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from proximo.errors import ModelError, TrainingError, UserError
from proximo.models.attention.cache import PromptCache, RowCache
from proximo.models.language import LanguageModel
from proximo.models.packing import pack, send
from proximo.models.precision.compute import casting
from proximo.models.precision.placement import Precision
from proximo.models.train_eval import evaluating
from proximo.records import Finish, Prompt, Response
from proximo.rollout.engine import Holding, fingerprint
from proximo.rollout.sampling import RandomKey, SamplingOptions, sample
from proximo.rollout.scheduler import Admission, Scheduler
from proximo.rollout.stopping import StopRules

_INITIAL_NEW_TOKENS = 64
"""New tokens that a row of the cache has room for at first. The cache grows when a response needs more."""
PREFILL_TOKENS = 4096
"""Largest number of prompt tokens in one packed prefill pass."""
TOKENS_PER_TRANSFER = 8
"""Tokens per row that an accelerator decodes before the host waits for a copy of them.

A response that has ended keeps its row for 3.5 more passes on average: 2% of all passes at 200 tokens each."""


class LocalEngine:
    """Samples from a language model in this process. In float32 the model can be the learner's own."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_ids: Collection[int],
        max_num_seqs: int = 64,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        """`max_num_seqs`: responses decoded at a time. `prefill_tokens`: most prompt tokens in one prefill pass."""
        if not isinstance(model, LanguageModel):
            raise ModelError(
                f"an engine samples from a LanguageModel, got {type(model).__name__}: write "
                "LocalEngine(LanguageModel(model), ...)"
            )
        if isinstance(eos_token_ids, int | str) or not isinstance(eos_token_ids, Collection):
            raise UserError(f"eos_token_ids must be a list of token ids, got {eos_token_ids!r:.60}: write [id]")
        if max_num_seqs < 1 or prefill_tokens < 1:
            raise UserError(f"max_num_seqs ({max_num_seqs}) and prefill_tokens ({prefill_tokens}) must be at least 1")
        self._model = model
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_num_seqs = max_num_seqs
        self._prefill_tokens = prefill_tokens
        self._version = 0
        self._loaded: frozenset[str] = frozenset()
        self._has_own_copy = False

    @property
    def logprobs_are_the_learners(self) -> bool:
        """True in float32, where engine and learner compute the same log-probs."""
        return self._model.precision is Precision.FLOAT32

    @property
    def max_logprob_error(self) -> float | None:
        """None: what it samples with is in this process, and `holds` reads it."""
        return None

    def samples_from(self, model: LanguageModel) -> bool:
        """Whether this model's own tensors are those that it samples with."""
        return self._model is model

    @torch.no_grad()
    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `Engine.load_weights`. Tensors that are the learner's own are not copied.

        Others are copied into a copy of the model: the one that the engine was made with may be somebody's reference,
        or the policy of another trainer.
        """
        own = self._parameters()
        for name, tensor in tensors.items():
            if name not in own or own[name].shape != tensor.shape:
                there = f"shape {tuple(own[name].shape)}" if name in own else "no tensor of that name"
                raise ModelError(f"{name} has shape {tuple(tensor.shape)}, and in the engine's model {there}")
        if not self._has_own_copy and any(own[name] is not tensor for name, tensor in tensors.items()):
            model = copy.deepcopy(self._model.model).requires_grad_(False)
            self._model, self._has_own_copy = LanguageModel(model, precision=self._model.precision), True
            own = self._parameters()
        for name, tensor in tensors.items():
            if own[name] is not tensor:
                own[name].copy_(tensor)
        self._version, self._loaded = version, frozenset(tensors)

    def holds(self) -> Holding | None:
        """See `Engine.holds`. The fingerprint is computed at each call, because the learner changes shared tensors."""
        if not self._loaded:
            return None
        loaded = {name: tensor for name, tensor in self._parameters().items() if name in self._loaded}
        return Holding(version=self._version, fingerprint=fingerprint(loaded))

    def _parameters(self) -> dict[str, Tensor]:
        return dict(self._model.model.named_parameters())

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        options: SamplingOptions,
        key: RandomKey,
        on_finished: Callable[[Response], None] | None = None,
    ) -> list[Response]:
        """See `Engine.generate`. The model is in eval mode during the call; its modes are restored afterwards.

        Raises UserError if there is no prompt or one is empty or too long, and TrainingError if logits are not finite.
        """
        check_request(prompts, num_samples, options, max_positions=self._model.position_limit)
        stop = StopRules(options=options, eos_token_ids=self._eos_token_ids, tokenizer=self._tokenizer)
        samples = [
            [
                _Growing(prompt=prompt, sample_index=s, stream=key.stream(index, s), limit=key.limit(index, options))
                for s in range(num_samples)
            ]
            for index, prompt in enumerate(prompts)
        ]
        scheduler, cache = self._plan(prompts, num_samples, options.max_new_tokens)
        with evaluating(self._model.model), casting():
            call = _Call(self._model, samples, scheduler=scheduler, cache=cache, stop=stop)
            for ended in call.run():
                ended.response = ended.record(stop, self._version)
                if on_finished is not None:
                    on_finished(ended.response)
        return [sample.response for group in samples for sample in group if sample.response is not None]

    def _plan(self, prompts: Sequence[Prompt], num_samples: int, max_new_tokens: int) -> tuple[Scheduler, RowCache]:
        lengths = [len(prompt.token_ids) for prompt in prompts]
        num_rows = min(self._max_num_seqs, num_samples * len(prompts))
        scheduler = Scheduler(lengths, num_samples=num_samples, num_rows=num_rows, prefill_tokens=self._prefill_tokens)
        return scheduler, rows_for(max(lengths), num_rows=num_rows, max_new_tokens=max_new_tokens)


def rows_for(longest_prompt: int, *, num_rows: int, max_new_tokens: int) -> RowCache:
    """A cache for `num_rows` responses to prompts of at most `longest_prompt` tokens."""
    return RowCache(
        num_rows=num_rows,
        initial_tokens=longest_prompt + min(max_new_tokens, _INITIAL_NEW_TOKENS),
        max_tokens=longest_prompt + max_new_tokens,
    )


@dataclass(kw_only=True)
class _Growing:
    """A response that is being decoded."""

    prompt: Prompt
    sample_index: int
    stream: int
    limit: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    response: Response | None = None
    """The finished record; None until the response has ended."""

    def record(self, stop: StopRules, policy_version: int) -> Response:
        assert self.finish is not None
        return Response(
            prompt=self.prompt,
            sample_index=self.sample_index,
            token_ids=tuple(self.token_ids),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            response_mask=torch.ones(len(self.token_ids), dtype=torch.bool),
            finish=self.finish,
            policy_version=policy_version,
            text=stop.text(self.token_ids, self.finish),
        )


@dataclass(frozen=True, kw_only=True)
class _ComputedPrompt:
    """A prefilled prompt: its index in the cache of its batch, and the logits of the first response token."""

    cache: PromptCache
    index: int
    logits: Tensor  # [V]


class _Call:
    """The state and the decoding loop of one call of `generate`."""

    def __init__(
        self,
        model: LanguageModel,
        samples: Sequence[Sequence[_Growing]],
        *,
        scheduler: Scheduler,
        cache: RowCache,
        stop: StopRules,
    ) -> None:
        """`samples[p][s]`: sample `s` of prompt `p`."""
        self._model = model
        self._head = model.head
        self._decoder = model.decoder()
        self._samples = samples
        self._scheduler = scheduler
        self._cache = cache
        self._stop = stop
        self._computed: dict[int, _ComputedPrompt] = {}
        ending = sorted({*stop.eos_token_ids, *stop.options.stop_token_ids})
        self._device = model.device  # read once: the property searches the model for a parameter
        self._ending_ids = torch.tensor(ending, dtype=torch.long, device=self._device)
        self._passes_at_once = _passes_at_once(self._device)

    def run(self) -> Iterator[_Growing]:
        """Decode until every sample has ended. Yields each sample when it ends."""
        while not self._scheduler.done:
            while admissions := self._scheduler.admit():
                yield from self._start(admissions)
            yield from self._decode()

    # Inference mode saves autograd's bookkeeping. All code that touches the cache runs in it, because inference tensors
    # cannot be changed in place outside of it. Records are made outside: they may enter a loss.
    @torch.inference_mode()
    def _start(self, admissions: Sequence[Admission]) -> list[_Growing]:
        """Prefill new prompts, fill the rows of admitted samples, draw first tokens. Returns the samples that ended."""
        self._prefill([admission.prompt_index for admission in admissions if admission.needs_prefill])
        for admission in admissions:
            computed = self._computed[admission.prompt_index]
            self._cache.place(computed.cache, computed.index, admission.rows)
        rows = [row for admission in admissions for row in admission.rows]
        logits = [
            self._computed[admission.prompt_index].logits.expand(len(admission.rows), -1) for admission in admissions
        ]
        ended = self._draw(rows, torch.cat(logits))
        for admission in admissions:
            if admission.first_sample + len(admission.rows) == len(self._samples[admission.prompt_index]):
                del self._computed[admission.prompt_index]
        return ended

    def _prefill(self, prompt_indices: Sequence[int]) -> None:
        if not prompt_indices:
            return
        packed = pack([self._samples[prompt][0].prompt.token_ids for prompt in prompt_indices], device=self._device)
        cache = PromptCache(packed.lengths)
        hidden = self._model.prefill(packed, cache)
        logits = self._head.logits(hidden)
        for index, prompt in enumerate(prompt_indices):
            self._computed[prompt] = _ComputedPrompt(cache=cache, index=index, logits=logits[index])

    @torch.inference_mode()
    def _decode(self) -> list[_Growing]:
        """Remove empty rows and decode a block of tokens for each row. Returns the responses that ended."""
        for move in self._scheduler.compact():
            self._cache.move(move.source, move.target)
        rows = range(len(self._scheduler.rows))
        if not rows:
            return []
        growing = [self._in_row(row) for row in rows]
        count = min(self._passes_at_once, max(response.limit - len(response.token_ids) for response in growing))
        numbers = np.array([[response.token_ids[-1] for response in growing], *_draw_numbers(growing, count)])
        tokens, streams, *positions = send(torch.from_numpy(numbers), self._device)
        drawn = []
        for layout, position in zip(self._cache.passes(len(rows), count), positions, strict=True):
            hidden = self._decoder(tokens, layout.positions, self._cache, layout)
            drawn.append(self._sample(self._head.logits(hidden), streams, position))
            tokens = drawn[-1][0]
        return self._note(rows, growing, drawn)

    def _draw(self, rows: Sequence[int], logits: Tensor) -> list[_Growing]:
        """Draw one token for each of B rows from logits [B, V]. Returns the responses that ended."""
        growing = [self._in_row(row) for row in rows]
        streams, positions = send(torch.from_numpy(np.array(_draw_numbers(growing, 1))), logits.device)
        return self._note(rows, growing, [self._sample(logits, streams, positions)])

    def _sample(self, logits: Tensor, streams: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`sampling.sample` with the options of this call."""
        options = self._stop.options
        return sample(logits, streams=streams, positions=positions, options=options, ending_ids=self._ending_ids)

    def _note(
        self, rows: Sequence[int], growing: Sequence[_Growing], drawn: Sequence[tuple[Tensor, Tensor]]
    ) -> list[_Growing]:
        """Append the drawn tokens to the responses and release the rows of responses that ended.

        `drawn`: tokens [B] and log-probs [B] of each pass. Tokens behind the end of a response are dropped. Returns the
        responses that ended. Raises TrainingError if a log-prob is not finite.
        """
        for response, tokens, logprobs in zip(growing, *_fetch(drawn), strict=True):
            for token, logprob in zip(tokens, logprobs, strict=True):
                if not math.isfinite(logprob):
                    raise _broken_logits(response)
                response.token_ids.append(token)
                response.logprobs.append(logprob)
                response.finish = self._stop.finish(response.token_ids, limit=response.limit)
                if response.finish is not None:
                    break
        self._scheduler.release(row for row, response in zip(rows, growing, strict=True) if response.finish is not None)
        return [response for response in growing if response.finish is not None]

    def _in_row(self, row: int) -> _Growing:
        slot = self._scheduler.rows[row]
        assert slot is not None
        return self._samples[slot.prompt_index][slot.sample_index]


def _passes_at_once(device: torch.device) -> int:
    """Decoding passes between two copies to the host: 1 on a CPU, which needs no copy."""
    return 1 if device.type == "cpu" else TOKENS_PER_TRANSFER


def _draw_numbers(growing: Sequence[_Growing], count: int) -> list[list[int]]:
    """The inputs of the next `count` draws of B rows: streams [B], then the token positions [B] of each draw."""
    positions = ([len(response.token_ids) + number for response in growing] for number in range(count))
    return [[response.stream for response in growing], *positions]


def _fetch(drawn: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[list[int]], list[list[float]]]:
    """Copy tokens [B] and log-probs [B] of each pass to the host, as one list per row. Waits for the device."""
    num_rows = len(drawn[0][0])
    tokens, logprobs = (torch.cat(passes).tolist() for passes in zip(*drawn, strict=True))
    return [tokens[row::num_rows] for row in range(num_rows)], [logprobs[row::num_rows] for row in range(num_rows)]


def check_request(
    prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, max_positions: int | None
) -> None:
    if not prompts:
        raise UserError("generating wants at least one prompt, but the list of prompts is empty")
    if num_samples < 1:
        raise UserError(f"num_samples ({num_samples}) must be at least 1")
    for prompt in prompts:
        if not prompt.token_ids:
            raise UserError(
                f"prompt '{prompt.id}' has no tokens; it needs at least one, if only the one that begins a text"
            )
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    wanted = len(longest.token_ids) + options.max_new_tokens
    if max_positions is not None and wanted > max_positions:
        raise UserError(
            f"prompt '{longest.id}' has {len(longest.token_ids)} tokens, which with max_new_tokens "
            f"({options.max_new_tokens}) makes {wanted}, but the model has {max_positions} positions; "
            "shorten the prompt or lower max_new_tokens"
        )


def _broken_logits(growing: _Growing) -> TrainingError:
    return TrainingError(
        f"the policy gave logits that are not finite for token {len(growing.token_ids)} of a response to prompt "
        f"'{growing.prompt.id}'; its weights have probably diverged: resume from an earlier checkpoint with a lower "
        "learning rate"
    )
