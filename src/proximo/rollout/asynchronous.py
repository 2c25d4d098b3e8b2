"""Asynchronous rollouts: responses are sampled while the learner trains, by a policy a bounded number of steps old.

Step t learns from the responses to the prompts of step t, as in a synchronous run, sampled under the same keys. They
begin when t - `staleness` steps are done. So the bound holds before anything is sampled, all that is sampled is learned
from, and short responses do not come earlier than long ones. The learner waits for a long response only after
`staleness` further steps.

With (staleness + 1) batches begun, no other order keeps the bound: every step takes one batch and begins one, so a
response that overtakes another makes that one too old.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from proximo.records import Prompt, Response
from proximo.rollout.engine import Engine
from proximo.rollout.sampling import RandomKey, SamplingOptions

PromptsOfStep = Callable[[int], Sequence[Prompt]]
"""The prompts of each step. Steps count from 0, as number of steps done before."""
CLOSING_SECONDS = 60.0
"""Seconds for the pass that a model runs, after which its thread notices that it must end."""
STOP_EVERY_SECONDS = 0.1


@runtime_checkable
class ThreadSafeEngine(Protocol):
    """An engine that may be called from several threads: also `load_weights` while others sample."""

    thread_safe: bool

    def stop(self) -> None:
        """End all running calls of `generate`, which raise an error. For the end of a run."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingPlan:
    """How the prompts of each step are sampled."""

    options: SamplingOptions
    num_samples: int
    """Responses to each prompt."""
    key_of: Callable[[int], RandomKey]
    """The key of a step."""
    num_steps: int
    staleness: int
    """Most steps between the weights that began a response and the step that learns from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """The responses of a step, and its waiting times."""

    responses: tuple[Response, ...]
    seconds: float
    """Seconds since the step before had its responses; for the first step, since it began to wait."""
    waited_seconds: float
    """The part of these seconds in which the learner waited for responses."""
    idle_seconds: float
    """The part of these seconds in which nothing was sampled."""


@dataclass(kw_only=True, eq=False, slots=True)
class _Batch:
    """The responses of one step, while they are sampled."""

    responses: Sequence[Response] | None = None
    failure: BaseException | None = None
    thread: threading.Thread | None = None


class AsyncRollouts:
    """Samples ahead of the learner, in one thread for each step. `close` ends them."""

    def __init__(self, engine: Engine, plan: SamplingPlan) -> None:
        """`engine`: a `ThreadSafeEngine`, which has the first weights."""
        self.engine = engine
        self._plan = plan
        self._batches: dict[int, _Batch] = {}
        self._changed = threading.Condition()
        self._idle = _IdleClock()
        self._taken_at: float | None = None
        self._settling_seconds = 0.0

    def take(
        self, step: int, prompts_of: PromptsOfStep, *, on_finished: Callable[[Response], None] | None = None
    ) -> Rollouts:
        """The responses of a step, after `step` steps are done. Begins the steps that the bound now allows, and waits.

        `on_finished` is called with each response that ends, also of later steps, in their threads. Raises the error of
        the engine for any step. It needs no deadline: the engine has one for each response.
        """
        if self._taken_at is None:
            self._taken_at = time.perf_counter()
            self._idle.read()
        for later in range(step, min(step + self._plan.staleness, self._plan.num_steps - 1) + 1):
            if later not in self._batches:
                self._begin(later, prompts_of(later), on_finished)
        begin, batch = time.perf_counter(), self._batches[step]
        self._wait_for([batch])
        assert batch.responses is not None, "the wait ends with responses or a failure"
        del self._batches[step]
        earlier, self._taken_at = self._taken_at, time.perf_counter()
        settling, self._settling_seconds = self._settling_seconds, 0.0
        return Rollouts(
            responses=tuple(batch.responses),
            seconds=self._taken_at - earlier,
            waited_seconds=settling + self._taken_at - begin,
            idle_seconds=self._idle.read(),
        )

    def settle(self) -> None:
        """Wait until all begun steps are complete. Raises the error of the engine."""
        begin = time.perf_counter()
        self._wait_for(self._batches.values())
        self._settling_seconds += time.perf_counter() - begin

    def complete(self) -> dict[int, Sequence[Response]]:
        """Step -> its responses, of later steps that are complete."""
        return {step: batch.responses for step, batch in self._batches.items() if batch.responses is not None}

    def put(self, step: int, responses: Sequence[Response]) -> None:
        """Add the responses of a step that were sampled before, so that it is not sampled again."""
        self._batches[step] = _Batch(responses=responses)

    def close(self) -> None:
        """End the threads. Unfinished responses are lost; `take` would begin them again."""
        assert isinstance(self.engine, ThreadSafeEngine)
        threads = [batch.thread for batch in self._batches.values() if batch.thread is not None]
        self._batches, self._taken_at = {}, None
        deadline = time.monotonic() + CLOSING_SECONDS
        while (alive := [thread for thread in threads if thread.is_alive()]) and time.monotonic() < deadline:
            self.engine.stop()  # again and again: a thread may only be about to call `generate`
            alive[0].join(STOP_EVERY_SECONDS)

    def _wait_for(self, batches: Collection[_Batch]) -> None:
        """Wait until these are complete. Raises the error of the engine for any batch."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or all(each.responses is not None for each in batches)
            )
            if self._failure is not None:
                raise self._failure

    @property
    def _failure(self) -> BaseException | None:
        return next((batch.failure for batch in self._batches.values() if batch.failure is not None), None)

    def _begin(self, step: int, prompts: Sequence[Prompt], on_finished: Callable[[Response], None] | None) -> None:
        batch = self._batches[step] = _Batch()

        def sample() -> None:
            try:
                with self._idle:
                    batch.responses = self.engine.generate(
                        prompts,
                        num_samples=self._plan.num_samples,
                        options=self._plan.options,
                        key=self._plan.key_of(step),
                        on_finished=on_finished,
                    )
            except BaseException as error:  # raised again in the learner's thread
                batch.failure = error
            with self._changed:
                self._changed.notify_all()

        batch.thread = threading.Thread(target=sample, daemon=True, name="rollouts")
        batch.thread.start()


class _IdleClock:
    """Adds up the time in which no thread is inside of it, as a context."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_busy = 0
        self._idle_seconds = 0.0
        self._counted_until = time.perf_counter()

    def __enter__(self) -> None:
        with self._lock:
            self._add_up()
            self._num_busy += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._add_up()
            self._num_busy -= 1

    def read(self) -> float:
        """Idle seconds since the last read."""
        with self._lock:
            self._add_up()
            seconds, self._idle_seconds = self._idle_seconds, 0.0
            return seconds

    def _add_up(self) -> None:
        now = time.perf_counter()
        if not self._num_busy:
            self._idle_seconds += now - self._counted_until
        self._counted_until = now
