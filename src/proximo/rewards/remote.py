"""Scores from a reward service on another machine: batches, attempts, deadlines. Not one request: remote_requests.py.

A service that is down, slow or talks nonsense costs a response its score and never the run: it is asked again, and what
has no grade by then is the infrastructure's fault. A service that says the request itself is wrong stops the run.
"""

import math
import queue
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from proximo.errors import ConfigError, DataError, TrainingError
from proximo.metrics.values import MetricValue
from proximo.records import Prompt, Response, Scored, ScoreState
from proximo.rewards.progress_log import LOG, TELL_EVERY_SECONDS, tell, telling_of_start
from proximo.rewards.protocol import check_body, request_body
from proximo.rewards.remote_requests import RefusedError, Requests, UnansweredError
from proximo.rewards.statistics import SourceStatistics

LONGEST_PAUSE_SECONDS = 30.0
CHECK_SECONDS = 15.0
"""For a service to answer at the start of a run. It has nothing to grade then."""
NOT_LIKE_THIS = (401, 403, 413)
"""The service may check rows, but not those of this request; any other refusal says that it checks none."""
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteLimits:
    """How much is asked at once, and for how long."""

    responses_per_request: int = 16
    max_concurrent_requests: int = 4
    request_seconds: float = 120.0
    """Wall-clock limit of one request, until the last byte of its answer is there."""
    step_seconds: float = 600.0
    """Wall-clock limit of one call of `score`."""
    attempts: int = 5
    """How often a request is sent that gets no usable answer."""
    initial_backoff_seconds: float = 0.5
    """Before the second attempt; each later pause is twice as long, up to LONGEST_PAUSE_SECONDS."""


class RemoteReward:
    """Asks the service at `url` for grades, in batches and several at once. `token` is sent as a bearer token."""

    concurrent = True

    def __init__(
        self,
        url: str,
        *,
        name: str = "remote",
        limits: RemoteLimits | None = None,
        token: str | None = None,
        token_env: str | None = None,
    ) -> None:
        self.name = name
        self.limits = limits or RemoteLimits()
        kept = self.limits.max_concurrent_requests
        self._requests = Requests(url, token=token, token_env=token_env, kept_connections=kept)
        self._statistics = SourceStatistics()

    def check(self) -> None:
        """Ask for grades on nothing, for CHECK_SECONDS at most.

        Raises ConfigError where the service does not answer, or not to this client.
        """
        call = _Call(time.monotonic() + min(CHECK_SECONDS, self.limits.step_seconds))
        try:
            with telling_of_start(self.name, f"an answer of {self._requests.url}"):
                self._answer(_Batch(index=0, responses=(), body=request_body(())), call)
        except RefusedError as error:
            raise ConfigError(f"reward source {self.name!r}: {error}") from None
        except UnansweredError as error:
            raise ConfigError(
                f"reward source {self.name!r}: no reward service answers at {self._requests.url} ({error}); start one "
                "with `proximo serve-reward`, or correct url"
            ) from None

    def check_prompts(self, prompts: Sequence[Prompt], origins: Mapping[str, str]) -> None:
        """Raises DataError, with the row's origin by the prompt's id, for a prompt to which no answer could be graded.

        Not every service checks rows: one that refuses, or does not answer within `request_seconds`, passes all.
        Raises ConfigError where it wants another token, or smaller requests.
        """
        size = self.limits.responses_per_request
        with telling_of_start(self.name, f"{self._requests.url}, which checks the rows"):
            for start in range(0, len(prompts), size):
                body = check_body(prompts[start : start + size], origins)
                try:
                    problem = self._checked(_Batch(index=start // size, responses=(), body=body))
                except RefusedError as error:
                    if error.status in NOT_LIKE_THIS:
                        raise ConfigError(f"reward source {self.name!r}: {error}") from None
                    return
                except UnansweredError as error:
                    LOG.warning("reward source %s: its service does not check the rows: %s", self.name, error)
                    return
                if problem is not None:
                    raise DataError(f"{problem} (says the service of reward source {self.name!r})")

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """Ends within `step_seconds`. What has no grade by then, or after all attempts, is a fault without a score.

        Raises TrainingError where the service says that a request is wrong, DataError for a prompt that cannot travel.
        """
        size = self.limits.responses_per_request
        parts = [responses[start : start + size] for start in range(0, len(responses), size)]
        batches = [_Batch(index=i, responses=part, body=request_body(part)) for i, part in enumerate(parts)]
        call = _Call(time.monotonic() + self.limits.step_seconds)
        for batch in batches:
            call.to_do.put(batch)
        for _ in range(min(self.limits.max_concurrent_requests, len(batches))):
            threading.Thread(target=self._work, args=(call,), daemon=True, name=f"reward-{self.name}").start()
        try:
            found = self._collect(len(batches), call)
        finally:
            call.over.set()
        late = f"not graded within step_seconds = {self.limits.step_seconds:g}"
        for batch in batches:
            if batch.index not in found:
                found[batch.index] = _Answer(
                    scored=_faults(batch.responses, late), seconds=self.limits.step_seconds, timed_out=True
                )
            self._count(batch, found[batch.index])
        return [each for batch in batches for each in found[batch.index].scored]

    def statistics(self) -> dict[str, MetricValue]:
        """The metrics of this source since they were last asked for."""
        taken, self._statistics = self._statistics, SourceStatistics()
        return taken.metrics(self.name) if taken.num_responses else {}

    def close(self) -> None:
        """Let go of the connections."""
        self._requests.close()

    def _work(self, call: "_Call") -> None:
        """One thread: batch after batch until there is none, or the call is over."""
        while not call.over.is_set():
            try:
                batch = call.to_do.get_nowait()
            except queue.Empty:
                return
            start = time.monotonic()
            try:
                scored, timed_out = self._answer(batch, call), False
            except UnansweredError as error:
                scored, timed_out = _faults(batch.responses, str(error)), error.timed_out
            except BaseException as error:  # raised again in the caller's thread
                call.answers.put((batch, error))
                return
            answer = _Answer(scored=scored, seconds=time.monotonic() - start, timed_out=timed_out)
            call.answers.put((batch, answer))

    def _collect(self, num_batches: int, call: "_Call") -> dict[int, "_Answer"]:
        """What the threads bring until the call's deadline, by the batch's index."""
        found: dict[int, _Answer] = {}
        start = time.monotonic()
        while len(found) < num_batches and (left := call.deadline - time.monotonic()) > 0:
            try:
                batch, answer = call.answers.get(timeout=min(left, TELL_EVERY_SECONDS))
            except queue.Empty:
                tell(self.name, len(found), num_batches, time.monotonic() - start)
                continue
            if isinstance(answer, RefusedError):
                raise TrainingError(f"reward source {self.name!r}: {answer}")
            if isinstance(answer, BaseException):
                raise answer
            found[batch.index] = answer
        return found

    def _answer(self, batch: "_Batch", call: "_Call") -> list[Scored]:
        return self._attempts(
            batch, call, lambda seconds: self._requests.ask(batch.body, batch.responses, seconds=seconds)
        )

    def _checked(self, batch: "_Batch") -> str | None:
        call = _Call(time.monotonic() + self.limits.request_seconds)
        return self._attempts(batch, call, lambda seconds: self._requests.check(batch.body, seconds=seconds))

    def _attempts(self, batch: "_Batch", call: "_Call", ask: Callable[[float], Found]) -> Found:
        """Attempt after attempt. Raises UnansweredError, with the last reason, and RefusedError."""
        limits = self.limits
        pause = limits.initial_backoff_seconds
        for attempt in range(1, limits.attempts + 1):
            batch.attempts = attempt
            seconds = min(limits.request_seconds, call.deadline - time.monotonic())
            try:
                return ask(seconds)
            except UnansweredError as error:
                wait = max(pause * _jitter(batch.index, attempt), error.not_before_seconds)
                if attempt == limits.attempts or time.monotonic() + wait >= call.deadline:
                    reason = f"{error}, at attempt {attempt}"
                    raise UnansweredError(reason, timed_out=error.timed_out) from None
            if call.over.wait(wait):
                raise UnansweredError("given up")
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    def _count(self, batch: "_Batch", answer: "_Answer") -> None:
        """Each response took as long as its request, all attempts together."""
        counts, size = self._statistics, len(answer.scored)
        states = [each.state for each in answer.scored]
        counts.num_responses += size
        counts.num_failures += states.count(ScoreState.INFRASTRUCTURE_FAULT)
        counts.num_model_faults += states.count(ScoreState.MODEL_FAULT)
        counts.num_timeouts += size if answer.timed_out else 0
        counts.num_retries += max(0, batch.attempts - 1)
        counts.seconds += [answer.seconds] * size


@dataclass(kw_only=True, slots=True)
class _Batch:
    """Responses that are asked about in one request."""

    index: int
    responses: Sequence[Response]
    body: bytes
    attempts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What became of a batch."""

    scored: list[Scored]
    seconds: float
    """From the first attempt to the answer, or until it was given up."""
    timed_out: bool
    """It was given up because time ran out, and not for what the service said."""


class _Call:
    """What the threads of one call of `score` share."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.over = threading.Event()
        self.to_do: queue.SimpleQueue[_Batch] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[_Batch, _Answer | BaseException]] = queue.SimpleQueue()


def _faults(responses: Sequence[Response], reason: str) -> list[Scored]:
    fault = ScoreState.INFRASTRUCTURE_FAULT
    return [Scored(response=response, score=math.nan, state=fault, reason=reason) for response in responses]


def _jitter(batch: int, attempt: int) -> float:
    """From 0.5 to 1, so that batches that failed together do not come back together. A function of position."""
    return 0.5 + zlib.crc32(f"{batch}:{attempt}".encode()) / 2**33
