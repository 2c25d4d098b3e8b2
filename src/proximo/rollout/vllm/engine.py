"""The vLLM engine: samples responses with vLLM servers, over HTTP."""

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from proximo.data.codec import end_of_prompt
from proximo.errors import TrainingError, UserError
from proximo.http_client import RequestRefusedError, UnansweredError
from proximo.metrics.values import Last, MetricValue, Sum
from proximo.models.language import LanguageModel
from proximo.records import Prompt, Response
from proximo.rollout.engine import Fingerprint, Holding, check_places, shapes_of
from proximo.rollout.local import check_request
from proximo.rollout.sampling import RandomKey, SamplingOptions
from proximo.rollout.session import CallRequest, ModelCall, check_options
from proximo.rollout.stopping import StopRules, response_of
from proximo.rollout.vllm.dispatch import ATTEMPTS, Dispatch
from proximo.rollout.vllm.pushed_weights import PushedWeights
from proximo.rollout.vllm.requests import Choice, write
from proximo.rollout.vllm.server import VLLMServer
from proximo.rollout.vllm.session import VLLMSession
from proximo.rollout.vllm.transfer import Transfer

LOG = logging.getLogger("proximo.rollout")
_NOT_FOUND = 404
_LOOK_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMOptions:
    """How the servers are used."""

    attempts: int = ATTEMPTS
    """Times that a response is asked for before the run stops."""
    transfer_folder: Path = Path("/dev/shm")
    """Folder that trainer and servers see under the same path. Weights travel through it."""
    dtype: torch.dtype | None = None
    """Dtype of transferred weights; None for that of the trainer."""
    max_logprob_error: float = 0.5
    """Largest difference of a log-prob that is accepted after a push."""
    may_have_masks: bool = False
    """The run leaves out tokens by top_k or top_p, so that servers may be those that return sampling masks."""
    sleeps: bool = False
    """Servers give up the memory of their GPU between two calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Push:
    """The weights that the servers were given last."""

    holding: Holding
    name: str
    """Version and fingerprint, as the servers report them."""
    digest: str
    """`fingerprint` of the sent tensors, which may have another dtype."""


class VLLMEngine:
    """Samples with one or several vLLM servers, which have the policy's model. Prompts are balanced over them.

    Weights reach the servers as `Transfer` says. Each response names the weights that made its tokens. A server with
    other weights (after a restart) loads the last push again, and the response is sampled again. If a server fails to
    answer, another one is asked.

    Weights that are loaded while responses are sampled take effect at the next token, and keys and values are computed
    again. A LoRA adapter serves the calls that begin after its load; earlier ones end with theirs.
    """

    logprobs_are_the_learners = False

    def __init__(
        self,
        servers: Sequence[VLLMServer],
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_ids: Collection[int],
        options: VLLMOptions | None = None,
    ) -> None:
        """`model`: the policy; its names and shapes are read, not its weights. `close` closes the servers' clients.

        Raises UserError without servers.
        """
        if not servers:
            raise UserError("the vLLM engine needs at least one server")
        self.options = options or VLLMOptions()
        self.servers = tuple(servers)
        self.counts: Counter[str] = Counter()
        """What happened since `statistics` was last read: `retries`, `stale` responses."""
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.model.named_parameters()}
        self._position_limit = model.position_limit
        self._vocab_size = model.vocab_size
        adapter = model.adapter_config
        files = PushedWeights(self.options.transfer_folder, adapter=adapter, num_tensors=len(self._shapes))
        self._files, self._transfer = files, Transfer(files, self.servers, self.options.dtype)
        self._last: _Push | None = None
        self._versions: dict[str, int] = {}
        """Name -> version of every push."""
        self._calls: Counter[str] = Counter()
        """Name of a push -> running calls of `generate` that began with it."""
        self._dispatches: set[Dispatch[Any]] = set()
        self._loading = threading.Lock()
        """Held while servers load weights, so that a reload never mixes with a push."""
        self._counting = threading.Lock()

    @property
    def thread_safe(self) -> bool:
        """See `ThreadSafeEngine`. Servers that sleep after one call would do so while another one samples."""
        return not self.options.sleeps

    @property
    def max_logprob_error(self) -> float:
        """Largest difference of a log-prob that is accepted after a push."""
        return self.options.max_logprob_error

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `Engine.load_weights`. All servers load the tensors at the same time.

        A server that cannot be reached is waited for. Raises TrainingError if one does not load them.
        """
        check_places(shapes_of(tensors), self._shapes)
        given, sent = Fingerprint(), Fingerprint(self.options.dtype)

        def each() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors.items():  # once: on several ranks each is gathered for it
                given.add(name, tensor)
                sent.add(name, tensor)
                yield name, tensor

        with self._loading:
            self._transfer.take(each(), shapes_of(tensors), kept=self._adapters_in_use())
            holding = Holding(version=version, fingerprint=given.hexdigest())
            name = f"proximo-{version}-{holding.fingerprint[:16]}"
            self._versions[name] = version
            self._files.keep(name)
            push = self._last = _Push(holding=holding, name=name, digest=sent.hexdigest())
            self._switch("wake")
            with ThreadPoolExecutor(len(self.servers), thread_name_prefix="vllm-push") as pool:
                failures = pool.map(lambda server: self._load(server, push, waits=True), self.servers)
                for server, failure in zip(self.servers, failures, strict=True):
                    if failure is not None:
                        raise TrainingError(f"{failure}; {server.last_words()}")
            self._transfer.settle()

    def holds(self) -> Holding | None:
        """See `Engine.holds`: the last push, if every server reports that it has it."""
        push = self._last
        if push is None:
            return None
        try:
            return push.holding if all(self._has(server, push) for server in self.servers) else None
        except (UnansweredError, RequestRefusedError) as error:
            LOG.warning("a vLLM server does not say which weights it has: %s", error)
            return None

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        options: SamplingOptions,
        key: RandomKey,
        on_finished: Callable[[Response], None] | None = None,
    ) -> list[Response]:
        """See `Engine.generate`. `on_finished` is called while the servers sample the others.

        Raises TrainingError if a response cannot be had, and UserError for a prompt that is empty or too long.
        """
        check_request(prompts, num_samples, options, max_positions=self._position_limit)
        stop = StopRules(options=options, eos_token_ids=self._eos_token_ids, tokenizer=self._tokenizer)
        asked, requests = dict[Hashable, tuple[Prompt, int]](), list[CallRequest]()
        for index, sample in product(range(len(prompts)), range(num_samples)):
            request = CallRequest(
                id=(index, sample),
                lane=index,
                token_ids=prompts[index].token_ids,
                stream=key.stream(index, sample),
                first_position=0,
                max_new_tokens=key.limit(index, options),
            )
            asked[request.id] = prompts[index], sample
            requests.append(request)
        found: dict[Hashable, Response] = {}
        with self._call() as push, self._opened(partial(self._answer, push, stop)) as session:
            session.submit(*requests)
            while session.num_running:
                for call in session.advance(_LOOK_SECONDS):
                    response = found[call.request.id] = response_of(
                        *asked[call.request.id],
                        token_ids=call.token_ids,
                        logprobs=call.logprobs,
                        finish=call.finish,
                        versions=call.versions,
                        sampling_mask=call.sampling_mask,
                        stop=stop,
                        prompt_end=end_of_prompt(self._tokenizer, call.request.token_ids),
                    )
                    if on_finished is not None:
                        on_finished(response)
        return [found[id] for id in asked]

    @contextmanager
    def _call(self) -> Generator[_Push]:
        """Around a call of `generate`: the last push, whose adapter is kept until the call has ended."""
        with self._counting:
            push = self._last
            if push is None:
                raise UserError("the vLLM engine has no weights yet: call load_weights first")
            self._calls[push.name] += 1
        try:
            yield push
        finally:
            with self._counting:
                self._calls[push.name] -= 1

    def _switch(self, what: Literal["sleep", "wake"]) -> None:
        """Put all servers to sleep or wake them, if they sleep between calls. Raises TrainingError if one does not."""
        for server in self.servers if self.options.sleeps else ():
            try:
                server.waiting_for_it(server.sleep if what == "sleep" else server.wake)
            except (UnansweredError, RequestRefusedError) as error:
                raise TrainingError(
                    f"the vLLM server {server.url} does not {what} (engine.sleep; it needs vLLM's "
                    f"enable-sleep-mode and CUDA): {error}; {server.last_words()}"
                ) from None

    def statistics(self) -> dict[str, MetricValue]:
        """Requests that were repeated and responses of older weights, since the last call; restarts of servers."""
        with self._counting:
            counts, self.counts = self.counts, Counter()
        found = {"engine/retries": Sum(counts["retries"]), "engine/stale_responses": Sum(counts["stale"])}
        return found | {"engine/restarts": Last(sum(server.num_restarts for server in self.servers))}

    def stop(self) -> None:
        """End the running calls of `generate` in other threads, which raise TrainingError."""
        for dispatch in tuple(self._dispatches):
            dispatch.stop()

    def _count(self, what: str, number: int) -> None:
        with self._counting:
            self.counts[what] += number

    def close(self) -> None:
        """Forget the last push, and close the connections. Servers are left awake."""
        with suppress(TrainingError):
            self._switch("wake")
        self._transfer.close()
        for server in self.servers:
            server.close()

    @contextmanager
    def session(self, options: SamplingOptions, *, max_tokens: int) -> Generator[VLLMSession]:
        """See `SessionEngine.session`. Each call is sampled with the weights that were pushed last when it is sent."""
        check_options(options)
        stop = StopRules(options=options, eos_token_ids=self._eos_token_ids, tokenizer=self._tokenizer)

        def ask(server: VLLMServer, request: CallRequest) -> ModelCall:
            with self._call() as push:
                return self._answer(push, stop, server, request)

        with self._call():  # fails without weights
            pass
        with self._opened(ask, max_tokens=max_tokens) as session:
            yield session

    @contextmanager
    def _opened(
        self, ask: Callable[[VLLMServer, CallRequest], ModelCall], *, max_tokens: int = sys.maxsize
    ) -> Generator[VLLMSession]:
        """A session whose calls `ask` sends, while servers are awake."""
        self._switch("wake")
        session = VLLMSession(
            self.servers,
            ask,
            attempts=self.options.attempts,
            max_tokens=max_tokens,
            max_positions=self._position_limit,
        )
        self._dispatches.add(session.dispatch)
        try:
            yield session
        finally:
            session.end(TrainingError("it was closed"))
            self._dispatches.discard(session.dispatch)
            self._count("retries", session.dispatch.num_retries)
        self._switch("sleep")

    def _answer(self, push: _Push, stop: StopRules, server: VLLMServer, request: CallRequest) -> ModelCall:
        """What a server answers to a call. Raises UnansweredError if another attempt may succeed."""
        return write(
            lambda body: self._choice(server, push, body, request.max_new_tokens),
            request,
            stop=stop,
            adapter=push.name if self._files.is_adapter else None,
            vocab_size=self._vocab_size if self.options.may_have_masks else None,
            versions=self._versions,
        )

    def _choice(self, server: VLLMServer, push: _Push, body: bytes, limit: int) -> Choice:
        """One response that the weights of this push or later ones made. Raises UnansweredError if others made it."""
        try:
            choice = server.generate(body, limit=limit, vocab_size=self._vocab_size)
        except RequestRefusedError as error:
            if error.status == _NOT_FOUND and self._files.is_adapter:
                self._reload(server, push)
                raise UnansweredError("it had lost the adapter: it was restarted, or serves another run too") from None
            raise
        if not self._files.is_adapter:
            named = [name for name, _ in choice.weight_versions]
            if not all(self._versions.get(name, -1) >= push.holding.version for name in named):
                self._count("stale", 1)
                self._reload(server, push)
                raise UnansweredError(_other_weights(sorted(set(named))))
        return choice

    def _adapters_in_use(self) -> list[str]:
        with self._counting:
            return [name for name, count in self._calls.items() if count and self._files.is_adapter]

    def _reload(self, server: VLLMServer, push: _Push) -> None:
        """Reload the last push, or the adapter of this push, into a server with other weights. Threads share one
        reload.
        """
        with self._loading:
            if not self._files.is_adapter:
                push = self._last or push
            if not self._has(server, push):
                LOG.warning("the vLLM server %s has other weights than it was given: it gets them again", server.url)
                if (failure := self._load(server, push)) is not None:
                    raise UnansweredError(failure)

    def _has(self, server: VLLMServer, push: _Push) -> bool:
        if self._files.is_adapter:
            return push.name in server.adapters()
        return server.weight_version() == push.name

    def _load(self, server: VLLMServer, push: _Push, *, waits: bool = False) -> str | None:
        """Load a push into one server. Returns why it failed, or None. `waits`: for one that cannot be reached."""

        def load() -> None:
            if self._files.is_adapter:
                folder = self._files.folder / push.name
                server.load_adapter(folder, name=push.name, kept=self._adapters_in_use())
            else:
                self._transfer.give(server, name=push.name, digest=push.digest)

        try:
            server.waiting_for_it(load) if waits else load()
        except (UnansweredError, RequestRefusedError) as error:
            version = push.holding.version
            return f"the vLLM server {server.url} did not load the policy's weights of version {version}: {error}"
        return None


def _other_weights(names: Sequence[str]) -> str:
    """The message that weights of these names made a response. A restarted server has weights of no trainer."""
    pushed = any(name.startswith("proximo-") for name in names)
    whose = ": another run probably pushes weights to this server, which is for one run at a time" if pushed else ""
    return f"it sampled with the weights {', '.join(names)}{whose}"
