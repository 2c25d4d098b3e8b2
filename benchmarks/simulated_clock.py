"""Asynchronous rollouts by a simulated clock: threads, pushes and interruptions are real, only time is not.

Decoding passes and training take a set time of the clock, and what the machine computes takes none. The clock goes on
when every thread sleeps or waits. So the times of a run do not depend on the machine and what else runs there.
"""

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import proximo.rollout.asynchronous as sampling_ahead
from proximo.records import Prompt, Response
from proximo.rollout.local import FairLock, LocalEngine

DEADLINE_SECONDS = 600.0


class Clock:
    """Simulated time. Threads that neither sleep nor wait are busy, and time stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()
        self._num_busy = 1
        self._sleepers: list[tuple[float, int, threading.Event]] = []
        self._num_slept = 0

    def enter(self) -> None:
        """One more thread is busy."""
        with self._lock:
            self._num_busy += 1

    def leave(self) -> None:
        """One thread less is busy: it ends, or waits for another one, which calls `enter` for it."""
        with self._lock:
            self._leave()

    def sleep(self, duration: float) -> None:
        """Until `duration` has passed by this clock."""
        woken = threading.Event()
        with self._lock:
            self._num_slept += 1
            heapq.heappush(self._sleepers, (self.now + duration, self._num_slept, woken))
            self._leave()
        assert woken.wait(DEADLINE_SECONDS), "a thread that others wait for is not busy"

    def _leave(self) -> None:
        self._num_busy -= 1
        if not self._num_busy and self._sleepers:
            self.now, _, woken = heapq.heappop(self._sleepers)
            self._num_busy += 1
            woken.set()


class Queue:
    """A lock whose holders come in the order in which they asked."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._is_held, self._waiting = False, deque[threading.Event]()

    def __enter__(self) -> None:
        mine = threading.Event()
        with self._lock:
            if not self._is_held:
                self._is_held = True
                return
            self._waiting.append(mine)
        self._clock.leave()
        assert mine.wait(DEADLINE_SECONDS), "the holder does not end"

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_held = bool(self._waiting)
            if self._waiting:
                self._clock.enter()
                self._waiting.popleft().set()


class SimulatedEngine(LocalEngine):
    """The built-in engine on its own weights. A pass, and a load of weights, takes a set time."""

    logprobs_are_the_learners = True
    clock: Clock

    def prepare(self, pass_time: float, training_time: float, *, several_calls: bool) -> None:
        """Set the times, and begin anew at 0. `several_calls` run at the same time; otherwise they run one by one."""
        self.clock, self._training_time = Clock(), training_time
        self._turns = _SlowLock(self.clock, pass_time)
        self._calls = nullcontext()  # ty: ignore[invalid-assignment] - `_queue` does that
        self._queue = nullcontext() if several_calls else Queue(self.clock)
        self.lengths: dict[int, list[int]] = {}
        self.seconds: dict[int, float] = {}

    def now(self) -> float:
        """Time since the run began."""
        return self.clock.now

    def has_trained(self) -> None:
        """The learner has done what is not sampling of a step."""
        self.clock.sleep(self._training_time)

    def attach(self, ahead: Any) -> None:
        """Sampling ahead goes by the clock."""
        sampling_ahead.time = SimpleNamespace(perf_counter=self.now, monotonic=time.monotonic)
        ahead._rollouts = _SimulatedRollouts(self, ahead._plan)

    def generate(self, prompts: Sequence[Prompt], **given: Any) -> list[Response]:
        """Notes lengths and times by the step of the key."""
        with self._queue:
            begin = self.now()
            responses = super().generate(prompts, **given)
            step = given["key"].step or 0
            self.lengths[step] = [len(each.token_ids) for each in responses]
            self.seconds[step] = self.now() - begin
        return responses


class _SlowLock(FairLock):
    """Sleeps after a turn, when others may have theirs."""

    def __init__(self, clock: Clock, duration: float) -> None:
        super().__init__()
        self._clock, self._duration = clock, duration

    @contextmanager
    def turn(self) -> Generator[None]:
        with super().turn():
            yield
        self._clock.sleep(self._duration)


class _SimulatedRollouts(sampling_ahead.AsyncRollouts):
    def __init__(self, engine: SimulatedEngine, plan: sampling_ahead.SamplingPlan) -> None:
        super().__init__(engine, plan)
        self._changed = _Responses(engine.clock)

    def _begin(self, *given: Any) -> None:
        self._changed._clock.enter()  # ty: ignore[unresolved-attribute] - until its `notify_all`
        super()._begin(*given)


class _Responses(threading.Condition):
    """The learner waits for responses, and threads that have sampled notify it and end."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._awaited: Callable[[], object] | None = None

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        if not predicate():
            self._awaited = predicate
            self._clock.leave()
        return super().wait_for(predicate, timeout)

    def notify_all(self) -> None:
        if self._awaited is not None and self._awaited():
            self._awaited = None
            self._clock.enter()
        self._clock.leave()
        super().notify_all()
