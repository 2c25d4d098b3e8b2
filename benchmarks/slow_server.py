"""An engine in a process of its own that is slow on purpose: it sleeps after each pass, as a remote server would take
its time without the learner's processor. Weights and responses go through pipes."""

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from proximo.models.language import LanguageModel
from proximo.records import Prompt, Response
from proximo.rollout.engine import Holding
from proximo.rollout.local import FairLock, LocalEngine
from proximo.rollout.rank_transfers import from_bytes, to_bytes
from proximo.rollout.sampling import RandomKey, SamplingOptions


class SlowServer:
    """What runs in the process of the server: the built-in engine on its own weights."""

    def __init__(self, config: LlamaConfig, tokenizer: PreTrainedTokenizerBase, *, rows: int) -> None:
        """`rows`: responses of a call that are decoded at a time."""
        torch.set_num_threads(1)
        language, end = LanguageModel(LlamaForCausalLM(config)), config.eos_token_id
        self._engine = LocalEngine(language, tokenizer, eos_token_ids=[end], max_num_seqs=rows, owns_model=True)
        self._engine._calls = nullcontext()  # ty: ignore[invalid-assignment] - `_calls` does that
        self._calls: AbstractContextManager[Any] = nullcontext()

    def prepare(self, seconds: float, *, several_calls: bool) -> None:
        """A pass, and a load of weights, takes `seconds` more. `several_calls` sleep at the same time, as the passes
        of a server whose time does not depend on how many responses it decodes. Otherwise they run one by one.
        """
        self._engine._turns = _SlowLock(seconds)
        self._calls = nullcontext() if several_calls else threading.Lock()

    def load_weights(self, version: int, arrays: Mapping[str, np.ndarray]) -> None:
        self._engine.load_weights(version, {name: torch.from_numpy(array) for name, array in arrays.items()})

    def generate(self, prompts: Sequence[Prompt], **options: Any) -> tuple[bytes, float]:
        """Responses as bytes, and seconds from the first pass to the last one."""
        with self._calls:
            begin = time.perf_counter()
            responses = self._engine.generate(prompts, **options)
            seconds = time.perf_counter() - begin
        size = options["num_samples"]
        return to_bytes((number // size, response) for number, response in enumerate(responses)), seconds

    def holds(self) -> Holding | None:
        return self._engine.holds()

    def stop(self) -> None:
        self._engine.stop()


class _SlowLock(FairLock):
    """Sleeps after a turn, when others may have theirs."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    @contextmanager
    def turn(self) -> Generator[None]:
        with super().turn():
            yield
        time.sleep(self._seconds)


class _Processes(BaseManager):
    pass


_Processes.register("SlowServer", SlowServer)


class SlowEngine:
    """The engine of the trainer: calls the server, and notes what it returns. `close` ends the server."""

    logprobs_are_the_learners = True
    max_logprob_error = None
    thread_safe = True

    def __init__(self, config: LlamaConfig, tokenizer: PreTrainedTokenizerBase, *, rows: int = 1024) -> None:
        self._processes = _Processes(ctx=get_context("spawn"))
        self._processes.start()
        self._server: Any = self._processes.SlowServer(config, tokenizer, rows=rows)  # ty: ignore[unresolved-attribute]
        self.lengths: dict[int, list[int]] = {}
        """Step -> lengths of the responses that the server returned."""
        self.seconds: dict[int, float] = {}
        """Step -> how long the server sampled them."""

    def prepare(self, seconds: float, *, several_calls: bool = False) -> None:
        """See `SlowServer.prepare`. Forgets what was noted."""
        self._server.prepare(seconds, several_calls=several_calls)
        self.lengths, self.seconds = {}, {}

    def now(self) -> float:
        """The time in seconds."""
        return time.perf_counter()

    def has_trained(self) -> None:
        """Nothing: the learner takes its own time."""

    def attach(self, ahead: Any) -> None:
        """Nothing: sampling ahead goes by the same clock."""

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self._server.load_weights(version, {name: tensor.detach().numpy() for name, tensor in tensors.items()})

    def holds(self) -> Holding | None:
        return self._server.holds()

    def stop(self) -> None:
        self._server.stop()

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        options: SamplingOptions,
        key: RandomKey,
        on_finished: Callable[[Response], None] | None = None,
    ) -> list[Response]:
        message, seconds = self._server.generate(prompts, num_samples=num_samples, options=options, key=key)
        responses = [response for _, response in from_bytes(message, prompts)]
        step = key.step or 0
        self.lengths[step], self.seconds[step] = [len(each.token_ids) for each in responses], seconds
        for response in responses:
            if on_finished is not None:
                on_finished(response)
        return responses

    def close(self) -> None:
        """End the server."""
        self._processes.shutdown()
