"""The reward source that asks a reward service on another machine: requests, batches, retries, deadlines.

A service that is down, slow or sends invalid replies never stops the run: requests are retried, and responses without a
result after that have no score. A service that refuses the request itself stops the run.
"""

import logging
import math
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from proximo.distributed.world import all_in_background
from proximo.errors import ConfigError, DataError, TrainingError
from proximo.http_client import HttpClient, RequestRefusedError, UnansweredError
from proximo.metrics.values import MetricValue
from proximo.records import Prompt, Response, Scored, ScoreState
from proximo.rewards.protocol import (
    CHECK_PATH,
    SCORE_PATH,
    SECONDS_HEADER,
    ProtocolError,
    ProtocolVersionError,
    check_body,
    read_checked,
    read_reply,
    request_body,
)
from proximo.rewards.source import grade_metrics
from proximo_verifiers.grader import GradeCounts
from proximo_verifiers.progress_log import LOG_EVERY_SECONDS, log_progress, logging_start

LOG = logging.getLogger("proximo.rewards")
LONGEST_PAUSE_SECONDS = 30.0
CHECK_SECONDS = 60.0
"""Time for a service to answer at the start of a run, when it has nothing to score."""
REFUSES_THIS_CHECK = (401, 403, 413)
"""Statuses with which a service refuses one check. Any other refusal means that it checks no rows at all."""
Reply = TypeVar("Reply")
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteLimits:
    """Sizes and time limits of requests."""

    responses_per_request: int = 16
    max_concurrent_requests: int = 4
    request_seconds: float = 120.0
    """Wall-clock limit of one request, up to the last byte of its reply."""
    step_seconds: float = 600.0
    """Wall-clock limit of one call of `score`."""
    attempts: int = 5
    """Number of times a request is sent that gets no usable reply."""
    initial_backoff_seconds: float = 0.5
    """Pause before the second attempt. Each later pause is twice as long, up to LONGEST_PAUSE_SECONDS."""


class RemoteReward:
    """Scores responses by the service at `url`, with several requests in flight. Sends `token` as a bearer token."""

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
        """`token_env`: the environment variable that held the token, for messages."""
        self.name = name
        self.limits = limits or RemoteLimits()
        self._token_env = token_env
        kept = self.limits.max_concurrent_requests
        self._client = HttpClient(url, token=token, kept_connections=kept, advice=self._advice)
        self._statistics = GradeCounts()

    def check(self) -> None:
        """Sends a request without responses, for CHECK_SECONDS at most.

        Raises ConfigError if the service does not answer, or refuses this client.
        """
        call = _Call(time.monotonic() + min(CHECK_SECONDS, self.limits.step_seconds))
        try:
            with logging_start(f"reward source {self.name}", f"a reply of {self._client.url}"):
                self._answer(_score_request(0, ()), call)
        except RequestRefusedError as error:
            raise ConfigError(f"reward source {self.name!r}: {error}") from None
        except UnansweredError as error:
            raise ConfigError(
                f"reward source {self.name!r}: no reward service answers at {self._client.url} ({error}); start one "
                "with `proximo serve-reward`, or correct url"
            ) from None

    def check_prompts(self, prompts: Sequence[Prompt], origins: Mapping[str, str]) -> None:
        """Raises DataError for a prompt whose responses the service cannot score.

        `origins` has the file and row of a prompt by its id. A service need not check rows: if it refuses, or does not
        answer within `request_seconds`, all prompts pass. Raises ConfigError if it requires another token or smaller
        requests.
        """
        with logging_start(f"reward source {self.name}", f"{self._client.url}, which checks the rows"):
            for number, part in enumerate(self._parts(prompts)):
                body = check_body(part, origins)
                request = _Request(number=number, path=CHECK_PATH, body=body, read=read_checked)
                try:
                    problem = self._answer(request, _Call(time.monotonic() + self.limits.request_seconds))
                except RequestRefusedError as error:
                    if error.status in REFUSES_THIS_CHECK:
                        raise ConfigError(f"reward source {self.name!r}: {error}") from None
                    return
                except UnansweredError as error:
                    LOG.warning("reward source %s: its service does not check the rows: %s", self.name, error)
                    return
                if problem is not None:
                    raise DataError(f"{problem} (reported by the service of reward source {self.name!r})")

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """One score per response, within `step_seconds`. A response without a result by then has no score.

        Raises TrainingError if the service refuses a request, DataError for a prompt that cannot be sent.
        """
        parts = self._parts(responses)
        requests = [_score_request(number, part) for number, part in enumerate(parts)]
        call = _Call(time.monotonic() + self.limits.step_seconds)
        answers = all_in_background(
            [partial(self._scored, request, part, call) for request, part in zip(requests, parts, strict=True)],
            at_once=self.limits.max_concurrent_requests,
            name=f"reward-{self.name}",
        )
        try:
            done = self._collect(answers, call)
        finally:
            call.over.set()
            for answer in answers:
                answer.cancel()
        late = f"no result within step_seconds = {self.limits.step_seconds:g}"
        scored: list[Scored] = []
        for request, part, answer in zip(requests, parts, answers, strict=True):
            no_scores = _Scores(scored=_faults(part, late), seconds=self.limits.step_seconds, timed_out=True)
            scores = answer.result() if answer in done else no_scores
            self._count(scores, num_retries=max(0, request.attempts - 1))
            scored += scores.scored
        return scored

    def statistics(self) -> dict[str, MetricValue]:
        """The metrics of this source since the last call."""
        taken, self._statistics = self._statistics, GradeCounts()
        return grade_metrics(taken, self.name)

    def close(self) -> None:
        """Closes the connections to the service."""
        self._client.close()

    def _parts(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        size = self.limits.responses_per_request
        return [items[start : start + size] for start in range(0, len(items), size)]

    def _scored(self, request: "_Request[list[Scored]]", responses: Sequence[Response], call: "_Call") -> "_Scores":
        """The scores of some responses, or why they have none. Raises RequestRefusedError."""
        start = time.monotonic()
        try:
            scored, timed_out = self._answer(request, call), False
        except UnansweredError as error:
            scored, timed_out = _faults(responses, str(error)), error.timed_out
        return _Scores(scored=scored, seconds=time.monotonic() - start, timed_out=timed_out)

    def _collect(self, answers: Sequence["Future[_Scores]"], call: "_Call") -> set["Future[_Scores]"]:
        """The answers that are there before the deadline of the call. Raises the first error."""
        done: set[Future[_Scores]] = set()
        start = time.monotonic()
        while len(done) < len(answers) and (left := call.deadline - time.monotonic()) > 0:
            fresh = wait(set(answers) - done, min(left, LOG_EVERY_SECONDS), FIRST_COMPLETED).done
            if not fresh:
                log_progress(self.name, len(done), len(answers), time.monotonic() - start)
            for answer in fresh:
                if isinstance(error := answer.exception(), RequestRefusedError):
                    raise TrainingError(f"reward source {self.name!r}: {error}")
                answer.result()
            done |= fresh
        return done

    def _answer(self, request: "_Request[Reply]", call: "_Call") -> Reply:
        """Sends a request until it is answered. Raises UnansweredError with the last reason, and
        RequestRefusedError."""
        limits = self.limits
        pause = limits.initial_backoff_seconds
        while True:
            request.attempts += 1
            try:
                return self._post(request, min(limits.request_seconds, call.deadline - time.monotonic()))
            except UnansweredError as error:
                wait = max(pause * _jitter(request.number, request.attempts), error.not_before_seconds)
                if request.attempts == limits.attempts or time.monotonic() + wait >= call.deadline:
                    reason = f"{error}, at attempt {request.attempts}"
                    raise UnansweredError(reason, timed_out=error.timed_out) from None
            if call.over.wait(wait):
                raise UnansweredError("the call was over")
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _post(self, request: "_Request[Reply]", seconds: float) -> Reply:
        headers = {SECONDS_HEADER: f"{max(seconds, 0.001):.3f}"}
        reply = self._client.send("POST", request.path, request.body, seconds=seconds, headers=headers)
        try:
            return request.read(reply)
        except ProtocolVersionError as error:
            raise RequestRefusedError(
                f"the service at {self._client.url} has another protocol version: {error}; use the same version on "
                "both sides"
            ) from None
        except ProtocolError as error:
            raise UnansweredError(f"the service sent an invalid reply: {error}") from None

    def _advice(self, status: int) -> str:
        if status in (401, 403):
            if self._token_env is None:
                return "it requires a token: set token_env to the environment variable that holds it"
            return f"the token in the environment variable {self._token_env} is not the one of the service"
        if 300 <= status < 400:
            return "redirects are not followed: set url to the final address"
        if status == 413:
            return "lower responses_per_request, or raise the service's limit"
        return "is url the address of a reward service (`proximo serve-reward`) of this version?"

    def _count(self, scores: "_Scores", *, num_retries: int) -> None:
        """Counts a request. The time of each response is that of its request, all attempts together."""
        counts, size = self._statistics, len(scores.scored)
        states = [item.state for item in scores.scored]
        counts.num_responses += size
        counts.num_failures += states.count(ScoreState.INFRASTRUCTURE_FAULT)
        counts.num_model_faults += states.count(ScoreState.MODEL_FAULT)
        counts.num_timeouts += size if scores.timed_out else 0
        counts.num_retries += num_retries
        counts.seconds += [scores.seconds] * size


@dataclass(kw_only=True, slots=True)
class _Request(Generic[Reply]):
    """A request of a call to the service: its body, how its reply is read, and how often it was sent."""

    number: int
    """Among those of the same call."""
    path: str
    body: bytes
    read: Callable[[bytes], Reply]
    """Raises ProtocolError for an invalid reply."""
    attempts: int = 0


def _score_request(number: int, responses: Sequence[Response]) -> _Request[list[Scored]]:
    read = partial(read_reply, responses=responses)
    return _Request(number=number, path=SCORE_PATH, body=request_body(responses), read=read)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scores:
    """The scores of the responses of one request."""

    scored: list[Scored]
    seconds: float
    """Time from the first attempt to the last."""
    timed_out: bool
    """True if time ran out, false if the service failed."""


class _Call:
    """What the requests of one call share."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.over = threading.Event()


def _faults(responses: Sequence[Response], reason: str) -> list[Scored]:
    fault = ScoreState.INFRASTRUCTURE_FAULT
    return [Scored(response=response, score=math.nan, state=fault, reason=reason) for response in responses]


def _jitter(number: int, attempt: int) -> float:
    """A factor from 0.5 to 1 that keeps requests which failed together from being sent again together.

    Depends on number and attempt alone, so that runs are reproducible.
    """
    return 0.5 + zlib.crc32(f"{number}:{attempt}".encode()) / 2**33
