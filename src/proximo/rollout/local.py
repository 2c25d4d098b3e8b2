"""The built-in engine: continuous batching over the rows of one key-value cache, in the trainer's process.

Each prompt is prefilled once for all its samples, packed with other prompts without padding; what all of them begin
with is computed once. Each decoding pass then draws one token per row. A response that ends frees its row at once for
the next sample. Logits are computed for the last position only. On an accelerator, a block of several tokens is decoded
before the host reads them. Tokens that a row wrote past the end of its response are then discarded, so responses do not
depend on the size of the block.
"""

import copy
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from proximo.data.codec import end_of_prompt
from proximo.errors import ModelError, TrainingError, UserError
from proximo.models.language import LanguageModel
from proximo.models.precision.compute import casting
from proximo.models.precision.placement import Precision
from proximo.records import Prompt, Response
from proximo.rollout.decoding import DecodingCall, GrowingResponse
from proximo.rollout.engine import Holding, check_places, fingerprint, shapes_of
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.scheduler import Scheduler
from proximo.rollout.session import check_options
from proximo.rollout.stopping import StopRules

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

    from proximo.models.attention.cache import RowCache
    from proximo.rollout.local_session import LocalSession


class LocalEngine:
    """Samples from a language model in this process. In float32 the model can be the learner's own.

    A call of `generate` waits for an earlier one in another thread. Weights that another thread loads take effect at
    the next token: responses that are being decoded keep their tokens, and their keys and values are computed again.
    """

    thread_safe = True
    samples_a_share = True

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        eos_token_ids: Collection[int],
        max_num_seqs: int = 64,
        prefill_tokens: int | None = None,
        owns_model: bool = False,
    ) -> None:
        """`max_num_seqs`: responses decoded at a time. `prefill_tokens`: most prompt tokens in one prefill pass; None
        for as many as suit the device.

        `owns_model`: nobody else uses the model, so that `load_weights` may write into it.
        """
        if not isinstance(model, LanguageModel):
            raise ModelError(
                f"an engine samples from a LanguageModel, got {type(model).__name__}: write "
                "LocalEngine(LanguageModel(model), ...)"
            )
        if isinstance(eos_token_ids, int | str) or not isinstance(eos_token_ids, Collection):
            raise UserError(f"eos_token_ids must be a list of token ids, got {eos_token_ids!r:.60}: write [id]")
        prefill_tokens = model.backbone.path.prefill_tokens if prefill_tokens is None else prefill_tokens
        if max_num_seqs < 1 or prefill_tokens < 1:
            raise UserError(f"max_num_seqs ({max_num_seqs}) and prefill_tokens ({prefill_tokens}) must be at least 1")
        self._model = model
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_num_seqs = max_num_seqs
        self._prefill_tokens = prefill_tokens
        self._version = 0
        self._loaded: frozenset[str] = frozenset()
        self._has_own_copy = owns_model
        self._calls = threading.Lock()
        self._turns = FairLock()
        """Each pass takes the lock, and so does each load of weights."""
        self._num_stops = 0

    @property
    def logprobs_are_the_learners(self) -> bool:
        """True in float32, where engine and learner compute the same log-probs."""
        return self._model.precision is Precision.FLOAT32

    @property
    def max_logprob_error(self) -> float | None:
        """None: its weights are in this process, and `holds` reads them."""
        return None

    def samples_from(self, model: LanguageModel) -> bool:
        """Whether this model's own tensors are those that it samples with."""
        return self._model is model

    @torch.no_grad()
    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `Engine.load_weights`. Tensors that are the learner's own are not copied.

        Others are copied into a copy of the model, since the model that the engine was made with may be a reference or
        the policy of another trainer.
        """
        own = self._parameters()
        check_places(shapes_of(tensors), shapes_of(own))
        if not self._has_own_copy and any(own[name] is not tensor for name, tensor in tensors.items()):
            model = copy.deepcopy(self._model.model).requires_grad_(False)
            self._model, self._has_own_copy = LanguageModel(model, precision=self._model.precision), True
            own = self._parameters()
        with self._turns.turn():
            for name, tensor in tensors.items():
                if own[name] is not tensor:
                    own[name].copy_(tensor)
            self._version, self._loaded = version, frozenset(tensors)

    def stop(self) -> None:
        """End the running calls of `generate` in other threads, which raise TrainingError."""
        self._num_stops += 1

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
        ends = [end_of_prompt(self._tokenizer, prompt.token_ids) for prompt in prompts]
        samples = [
            [
                GrowingResponse(
                    what=f"a response to prompt '{prompt.id}'",
                    prompt=prompt,
                    prompt_end=end,
                    sample_index=s,
                    stream=key.stream(index, s),
                    limit=key.limit(index, options),
                )
                for s in range(num_samples)
            ]
            for index, (prompt, end) in enumerate(zip(prompts, ends, strict=True))
        ]
        num_stops = self._num_stops
        scheduler, cache = self._plan(prompts, num_samples, options.max_new_tokens)
        with self._calls, _on(self._model.device), self._model.evaluating():
            call = DecodingCall(
                self._model,
                samples,
                scheduler=scheduler,
                cache=cache,
                stop=stop,
                prefill_tokens=self._prefill_tokens,
                version=lambda: self._version,
            )
            try:
                while not call.done:
                    with casting():  # once for all passes with the same weights
                        self._decode(call, stop, on_finished, num_stops=num_stops)
            finally:
                call.close()
        return [sample.response for group in samples for sample in group if sample.response is not None]

    @contextmanager
    def session(self, options: SamplingOptions, *, max_tokens: int) -> Generator["LocalSession"]:
        """See `SessionEngine.session`. Calls of `generate` in other threads wait until it ends.

        It keeps the caches of lanes whose calls have ended while there is room: rows for `max_num_seqs` running calls,
        and more up to 512 rows and 1 GiB.
        """
        from proximo.rollout.local_session import LocalSession

        check_options(options)
        stop = StopRules(options=options, eos_token_ids=self._eos_token_ids, tokenizer=self._tokenizer)
        num_stops = self._num_stops

        @contextmanager
        def turn() -> Generator[None]:
            self._check_stops(num_stops)
            with self._turns.turn():
                yield

        with self._calls, _on(self._model.device), self._model.evaluating():
            session = LocalSession(
                self._model,
                stop=stop,
                prefill_tokens=self._prefill_tokens,
                version=lambda: self._version,
                turn=turn,
                num_slots=self._max_num_seqs,
                max_tokens=max_tokens,
            )
            try:
                yield session
            finally:
                session.end(TrainingError("it was closed"))
                session.close()

    def _check_stops(self, num_stops: int) -> None:
        if self._num_stops != num_stops:
            raise TrainingError("the engine was stopped while it sampled")

    def _decode(
        self,
        call: DecodingCall,
        stop: StopRules,
        on_finished: Callable[[Response], None] | None,
        *,
        num_stops: int,
    ) -> None:
        """Decode until every response has ended, or other weights were loaded."""
        if call.has_stale_cache:
            with self._turns.turn():
                call.compute_anew()
        while not call.done:
            self._check_stops(num_stops)
            with self._turns.turn():
                if call.has_stale_cache:
                    return
                ended = call.step()
            for growing in ended:
                growing.response = growing.record(stop)
                if on_finished is not None:
                    on_finished(growing.response)

    def _plan(self, prompts: Sequence[Prompt], num_samples: int, max_new_tokens: int) -> "tuple[Scheduler, RowCache]":
        lengths = [len(prompt.token_ids) for prompt in prompts]
        num_rows = min(self._max_num_seqs, num_samples * len(prompts))
        scheduler = Scheduler(lengths, num_samples=num_samples, num_rows=num_rows, prefill_tokens=self._prefill_tokens)
        return scheduler, rows_for(self._model, max(lengths), num_rows=num_rows, max_new_tokens=max_new_tokens)


def rows_for(model: LanguageModel, longest_prompt: int, *, num_rows: int, max_new_tokens: int) -> "RowCache":
    """A cache for `num_rows` responses of a model to prompts of at most `longest_prompt` tokens."""
    from proximo.models.attention.cache import RowCache

    return RowCache(
        num_rows=num_rows,
        initial_tokens=longest_prompt + min(max_new_tokens, model.backbone.path.first_tokens),
        max_tokens=longest_prompt + max_new_tokens,
    )


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


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, it is the current device of this thread, on which kernels of Triton are launched and graphs captured."""
    is_there = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.device(device) if is_there else nullcontext()


class FairLock:
    """A fair lock for two threads. The waiting one gets it next; a plain lock may always return to its last holder."""

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._now = threading.Lock()

    @contextmanager
    def turn(self) -> Generator[None]:
        """Inside, no other thread has a turn."""
        with self._next:
            self._now.acquire()
        try:
            yield
        finally:
            self._now.release()
