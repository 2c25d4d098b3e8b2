"""Engines for several ranks.

The built-in engine samples a share of the prompts on each rank. Any other engine is called on rank 0 alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import itemgetter

from torch import Tensor

from proximo import errors
from proximo.distributed.world import World, current
from proximo.errors import ProximoError, RankError, TrainingError
from proximo.metrics.values import MetricValue
from proximo.models.language import LanguageModel
from proximo.records import Prompt, Response
from proximo.rollout.engine import Engine, EngineOfRanks, Holding, SharingEngine, push_weights, statistics_of
from proximo.rollout.rank_transfers import StreamedWeights, as_sent, from_bytes, to_bytes
from proximo.rollout.sampling import RandomKey, SamplingOptions

POLL_SECONDS = 0.02
"""Rank 0 looks this often for responses that ended on other ranks, while it samples its own and afterwards."""
CHANNEL = "responses"
_END = b"all"
"""The message of a rank that has sampled all its responses, or failed."""
_Identity = tuple[str, int, tuple[int, ...], bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """The samples of one rank, or its error."""

    responses: bytes = b""
    error: str | None = None
    kind: str = ""
    """Name of the exception's class."""


class RanksEngine(EngineOfRanks):
    """The built-in engine of each rank: rank r samples the responses to the prompts r, r + n, ... of n ranks.

    The ranks meet when all have sampled, not between two tokens. Draws are those of one rank, since they are functions
    of the prompt's index in the whole batch.
    """

    def __init__(self, own: SharingEngine) -> None:
        self.own = own

    @property
    def logprobs_are_the_learners(self) -> bool:
        """See `Engine.logprobs_are_the_learners`; equal on all ranks."""
        return self.own.logprobs_are_the_learners

    @property
    def max_logprob_error(self) -> float | None:
        """See `Engine.max_logprob_error`; equal on all ranks."""
        return self.own.max_logprob_error

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `Engine.load_weights`. Each rank loads its own engine."""
        self.own.load_weights(version, tensors)

    def push(self, version: int, model: LanguageModel) -> bool:
        """See `push_weights`. An engine that samples from the model's own tensors copies none: they stay sharded."""
        with nullcontext() if self.own.samples_from(model) else model.backbone.gathered():
            return push_weights(self, version, dict(model.trainable_parameters()))

    def sampling_with(self, model: LanguageModel) -> AbstractContextManager[None]:
        """Gather sharded weights on every rank while the block runs."""
        return model.backbone.gathered()

    def statistics(self) -> dict[str, MetricValue]:
        """See `statistics_of`: those of rank 0, which every rank has to ask for."""
        return current().on_rank_0(lambda: statistics_of(self.own), what="statistics of the engine")

    def holds(self) -> Holding | None:
        """See `Engine.holds`. Where tensors are sharded, the fingerprint is that of this rank's parts."""
        return self.own.holds()

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        options: SamplingOptions,
        key: RandomKey,
        on_finished: Callable[[Response], None] | None = None,
    ) -> list[Response]:
        """See `Engine.generate`. All ranks give the same arguments and get the same responses.

        `on_finished` is called only on rank 0, with the responses of all ranks. If one rank raises, all do.
        """
        if not prompts:  # refused by the built-in engine, on every rank
            return self.own.generate(prompts, num_samples=num_samples, options=options, key=key)
        world = current()
        rank, size = world.rank, world.size
        begun = None if on_finished is None else _Begun(world, prompts, on_finished)
        own: list[Response] = []
        failure: Exception | None = None
        try:
            if share := prompts[rank::size]:
                own = self.own.generate(
                    share,
                    num_samples=num_samples,
                    options=options,
                    key=key.of_share(rank, size),
                    on_finished=None if begun is None else begun.ended,
                )
        except Exception as error:  # raised below, when the others know of it
            failure = error
        if begun is not None:
            failure = begun.wait_for_others(failure)
        if failure is not None:
            mine = _Share(error=str(failure), kind=type(failure).__name__)
        else:
            indices = [index for index in range(rank, len(prompts), size) for _ in range(num_samples)]
            mine = _Share(responses=to_bytes(zip(indices, own, strict=True)))
        shares = world.gather(mine, what="responses of all ranks")
        if failure is not None:
            raise failure
        for number, share in enumerate(shares):
            if share.error is not None:
                raise _raised_elsewhere(number, share)
        found = [pair for share in shares for pair in from_bytes(share.responses, prompts)]
        known: dict[_Identity, list[Response]] = {}
        for response in own if begun is None else [*own, *begun.records]:
            known.setdefault(_identity(response), []).append(response)
        in_order = (response for _, response in sorted(found, key=itemgetter(0)))
        # What this rank has, and a source may have begun to score, stays the same object.
        return [same.pop() if (same := known.get(_identity(each))) else each for each in in_order]


def _identity(response: Response) -> _Identity:
    # With the log-probs: a batch may ask one prompt several times, and their last bits depend on the neighbours.
    return response.prompt.id, response.sample_index, response.token_ids, response.logprobs.numpy().tobytes()


def _raised_elsewhere(rank: int, share: _Share) -> Exception:
    """The error of another rank, with the same class if that is one of Proximo's."""
    known = getattr(errors, share.kind, None)
    if isinstance(known, type) and issubclass(known, ProximoError):
        return known(f"rank {rank}: {share.error}")
    return RankError(f"rank {rank}: {share.kind}: {share.error}")


class _Begun:
    """Hands each response to a callback on rank 0 as it ends, on whichever rank."""

    def __init__(self, world: World, prompts: Sequence[Prompt], callback: Callable[[Response], None]) -> None:
        self._world = world
        self._prompts = prompts
        # Equal prompts of a batch are one object, and the callback needs no more than that.
        self._indices = {prompt.id: index for index, prompt in reversed(list(enumerate(prompts)))}
        self._callback = callback
        self._num_ended = 0
        self._last_look = 0.0
        self.records: list[Response] = []
        """On rank 0: the responses of other ranks, as the callback got them."""

    def ended(self, response: Response) -> None:
        """Call with each response of this rank when it ends."""
        if not self._world.leads:
            self._world.send_to_first(CHANNEL, to_bytes([(self._indices[response.prompt.id], response)]))
            return
        self._callback(response)
        if time.monotonic() - self._last_look > POLL_SECONDS:
            self._look()

    def wait_for_others(self, failure: Exception | None) -> Exception | None:
        """Call when this rank has sampled, or failed. Returns the failure, or that of the callback.

        On rank 0 it returns when all other ranks have called it, so that no message is left for the next call. Raises
        RankError if nothing comes from them for too long.
        """
        if not self._world.leads:
            self._world.send_to_first(CHANNEL, _END)
            return failure
        with self._world.waiting("responses of the other ranks"):
            deadline = time.monotonic() + self._world.timeout_seconds
            while self._num_ended < self._world.size - 1:
                self._world.raise_failure("responses of the other ranks")
                if failure is not None:
                    self._callback = _ignore
                try:
                    has_news = self._look()
                except Exception as error:
                    failure, has_news = error, True
                if has_news:
                    deadline = time.monotonic() + self._world.timeout_seconds
                elif time.monotonic() > deadline:
                    raise RankError(
                        f"{self._num_ended} of {self._world.size - 1} other ranks have sampled their responses, and "
                        f"nothing came from the rest for {self._world.timeout_seconds:g} s"
                    )
                else:
                    time.sleep(POLL_SECONDS)
        return failure

    def _look(self) -> bool:
        """Pass on new responses of other ranks. False if there are none."""
        self._last_look = time.monotonic()
        messages = self._world.received(CHANNEL)
        self._num_ended += messages.count(_END)
        for message in (each for each in messages if each != _END):
            for _, response in from_bytes(message, self._prompts):
                self.records.append(response)
                self._callback(response)
        return bool(messages)


def _ignore(response: Response) -> None:
    del response


class FirstRankEngine(EngineOfRanks):
    """An engine that rank 0 alone calls, such as vLLM's or a user's: all ranks get its responses."""

    def __init__(self, own: Engine) -> None:
        self.own = own
        self._exact, self._error = current().on_rank_0(
            lambda: (bool(own.logprobs_are_the_learners), own.max_logprob_error), what="the engine's precision"
        )

    @property
    def logprobs_are_the_learners(self) -> bool:
        """See `Engine.logprobs_are_the_learners`; read once on rank 0."""
        return self._exact

    @property
    def max_logprob_error(self) -> float | None:
        """See `Engine.max_logprob_error`; read once on rank 0."""
        return self._error

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `Engine.load_weights`. Rank 0 loads its tensors, which must be whole."""
        current().on_rank_0(lambda: self.own.load_weights(version, tensors), what="loading weights into the engine")

    def push(self, version: int, model: LanguageModel) -> bool:
        """See `push_weights`. Sharded tensors are gathered layer by layer, and only for an engine that lacks them."""
        weights = StreamedWeights(dict(model.trainable_parameters()))
        whole = weights.fingerprint()
        return weights.give(lambda: push_weights(self.own, version, weights, fingerprint_of_all=whole))

    def sampling_with(self, model: LanguageModel) -> AbstractContextManager[None]:
        """See `sampling_with`. The engine has its own weights."""
        del model
        return nullcontext()

    def holds(self) -> Holding | None:
        """The weights that the engine of rank 0 holds; every rank has to ask."""
        return current().on_rank_0(self.own.holds, what="the weights that the engine holds")

    def statistics(self) -> dict[str, MetricValue]:
        """See `statistics_of`: those of rank 0."""
        return current().on_rank_0(lambda: statistics_of(self.own), what="statistics of the engine")

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        options: SamplingOptions,
        key: RandomKey,
        on_finished: Callable[[Response], None] | None = None,
    ) -> list[Response]:
        """See `Engine.generate`. Every rank gets the responses of rank 0."""
        kept: list[Response] = []

        def run() -> bytes:
            kept[:] = self.own.generate(
                prompts, num_samples=num_samples, options=options, key=key, on_finished=on_finished
            )
            return to_bytes(_numbered(kept, prompts, num_samples))

        message = current().on_rank_0(run, what="responses of the engine")
        sent = [response for _, response in from_bytes(message, prompts)]
        return as_sent(kept, sent) if kept else sent


def _numbered(responses: Sequence[Response], prompts: Sequence[Prompt], num_samples: int) -> list[tuple[int, Response]]:
    """Each response with the index of its prompt. Raises TrainingError unless they are ordered by prompt."""
    if len(responses) != len(prompts) * num_samples:
        raise TrainingError(
            f"the engine must give {num_samples} responses to each of {len(prompts)} prompts, it gave {len(responses)}"
        )
    for number, response in enumerate(responses):
        asked = prompts[number // num_samples]
        if response.prompt.id != asked.id:
            raise TrainingError(
                f"the engine must order its responses by prompt: response {number} is to prompt "
                f"{response.prompt.id!r}, not {asked.id!r}"
            )
    return [(number // num_samples, response) for number, response in enumerate(responses)]


def on_ranks(engine: Engine) -> Engine:
    """The engine as all ranks of this world use it; the engine itself in a world of one. Every rank has to call it.

    The built-in engine samples a share on each rank. Any other engine is called only on rank 0.
    """
    if current().size == 1 or isinstance(engine, EngineOfRanks):
        return engine
    shares = isinstance(engine, SharingEngine) and engine.samples_a_share
    return RanksEngine(engine) if shares else FirstRankEngine(engine)
