"""A reward source behind HTTP: admission, authorisation, counts. Not the process that serves it:
commands/serve_reward.py.

| address | what for |
|---|---|
| POST /v1/score | grades; bodies as in protocol.py |
| POST /v1/check | whether answers to some prompts could be graded |
| GET /metrics | counts and latencies, as JSON |
| GET /health | whether it is up; wants no token |
"""

import asyncio
import hmac
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proximo.errors import DataError, ProximoError
from proximo.records import Scored
from proximo.rewards.protocol import (
    CHECK_PATH,
    SCHEMA,
    SCORE_PATH,
    SECONDS_HEADER,
    WireError,
    checked_body,
    read_check,
    read_request,
    reply_body,
)
from proximo.rewards.source import CheckingSource, RewardSource

LOG = logging.getLogger("proximo.rewards")
LATENCIES_KEPT = 1000
BODY_SECONDS = 30.0
"""For a request's body to arrive."""
PROBE_BYTES = 200
"""A request about no response is not longer."""
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLimits:
    """What a service takes on."""

    concurrency: int = 4
    """Requests that are scored at the same time."""
    queue_size: int = 64
    """Requests that may wait beside them; more are sent away with 503."""
    request_bytes: int = 64 * 2**20


class _SentAwayError(Exception):
    """The request ends here, with this status."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = headers


class RewardService:
    """Grades of `source`, which is asked from several threads at once. With a `token`, for who knows it."""

    def __init__(self, source: RewardSource, *, limits: ServiceLimits | None = None, token: str | None = None) -> None:
        self.source = source
        self.limits = limits or ServiceLimits()
        self.token = token
        self.statistics = ServiceStatistics()
        self._threads = ThreadPoolExecutor(self.limits.concurrency, thread_name_prefix="score")
        self._turn = asyncio.Semaphore(self.limits.concurrency)
        self._admitted = 0

    def application(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route(SCORE_PATH, self.score, methods=["POST"]),
                Route(CHECK_PATH, self.check, methods=["POST"]),
                Route("/metrics", self.metrics, methods=["GET"]),
                Route("/health", self.health, methods=["GET"]),
            ]
        )

    async def health(self, _: Request) -> Response:
        """Up, and of which version."""
        return JSONResponse({"status": "ok", "format": SCHEMA})

    async def metrics(self, request: Request) -> Response:
        """Counts since the start, and latencies of the last requests."""
        try:
            self._authorise(request)
        except _SentAwayError as error:
            return _said(error)
        waiting = max(0, self._admitted - self.limits.concurrency)
        return JSONResponse({**self.statistics.as_json(), "running": self._admitted - waiting, "waiting": waiting})

    async def score(self, request: Request) -> Response:
        """Grades on the request's responses, or the status that says why not."""
        return await self._admitted_to(self._scored, request)

    async def check(self, request: Request) -> Response:
        """What is wrong with the first of the request's rows that no answer could be graded to."""
        return await self._admitted_to(self._checked, request)

    async def _admitted_to(self, work: Callable[[Request], Awaitable[bytes]], request: Request) -> Response:
        try:
            self._authorise(request)
            if self._admitted >= self.limits.concurrency + self.limits.queue_size:
                raise _SentAwayError(503, "too many requests wait already", {"Retry-After": "1"})
            self._admitted += 1
            try:
                body = await work(request)
            finally:
                self._admitted -= 1
        except _SentAwayError as error:
            self.statistics.count_refusal(error.status)
            return _said(error)
        return Response(body, media_type="application/json")

    def _authorise(self, request: Request) -> None:
        if self.token is None:
            return
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            raise _SentAwayError(401, "a bearer token is wanted", {"WWW-Authenticate": "Bearer"})

    async def _scored(self, request: Request) -> bytes:
        start = time.monotonic()
        body = await self._body(request)
        if len(body) <= PROBE_BYTES and not _read(read_request, body):
            return reply_body(())  # at once: who asks about nothing wants to know whether anybody is here
        scored, reply = await self._in_turn(request, start, lambda: self._grades(body))
        self.statistics.count(scored, time.monotonic() - start)
        return reply

    async def _checked(self, request: Request) -> bytes:
        start = time.monotonic()
        body = await self._body(request)
        return await self._in_turn(request, start, lambda: self._problem(body))

    async def _in_turn(self, request: Request, start: float, work: Callable[[], Found]) -> Found:
        seconds = _patience(request)
        async with self._turn:
            if time.monotonic() - start >= seconds:
                raise _SentAwayError(503, "its turn came too late", {"Retry-After": "1"})
            # The work is not given up with its request: who asks again would find the same worker busy.
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, work))

    async def _body(self, request: Request) -> bytes:
        """The whole body. Too much of it, or too slowly, is refused before it is all there."""
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for piece in request.stream():
                    body += piece
                    if len(body) > self.limits.request_bytes:
                        raise _SentAwayError(413, f"at most {self.limits.request_bytes} bytes are taken at once")
        except TimeoutError:
            raise _SentAwayError(408, f"the request did not arrive within {BODY_SECONDS:g} s") from None
        except ClientDisconnect:
            raise _SentAwayError(400, "the request was broken off") from None
        return bytes(body)

    def _grades(self, body: bytes) -> tuple[Sequence[Scored], bytes]:
        """In a thread. A source that fails as a whole is this service's failure, and the log says which."""
        responses = _read(read_request, body)
        try:
            scored = self.source.score(responses)
            return scored, reply_body(scored)
        except Exception as error:  # the code of others, too: whatever it raises, this request alone has failed
            raise _failed(error) from error

    def _problem(self, body: bytes) -> bytes:
        """In a thread."""
        prompts, origins = _read(read_check, body)
        try:
            if isinstance(self.source, CheckingSource):
                self.source.check_prompts(prompts, origins)
        except DataError as error:
            return checked_body(str(error))
        except Exception as error:
            raise _failed(error) from error
        return checked_body(None)


class ServiceStatistics:
    """What was served, counted in the event loop's thread."""

    def __init__(self) -> None:
        self.requests = 0
        self.refused: Counter[str] = Counter()
        self.grades: Counter[str] = Counter()
        self.latencies: deque[float] = deque(maxlen=LATENCIES_KEPT)

    def count(self, scored: Sequence[Scored], seconds: float) -> None:
        """A request that was answered after so long."""
        self.requests += 1
        self.grades.update(each.state.value for each in scored)
        self.latencies.append(seconds)

    def count_refusal(self, status: int) -> None:
        """A request that was sent away."""
        self.refused[str(status)] += 1

    def as_json(self) -> dict[str, Any]:
        """`latency_seconds` is over the last LATENCIES_KEPT requests, null before the first."""
        latencies = sorted(self.latencies)
        return {
            "requests": self.requests,
            "refused": dict(self.refused),
            "grades": dict(self.grades),
            "latency_seconds": {f"p{share}": nearest_rank(latencies, share) for share in (50, 95, 99)},
        }


def nearest_rank(ordered: Sequence[float], percent: int) -> float | None:
    """The smallest value that at least `percent` of the values do not exceed; None of no values."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else None


def _read(read: Callable[[bytes], Found], body: bytes) -> Found:
    try:
        return read(body)
    except WireError as error:
        raise _SentAwayError(400, str(error)) from None


def _failed(error: Exception) -> _SentAwayError:
    """Into the log goes what is said on purpose as one line, and everything else with its traceback."""
    LOG.error("%s", error, exc_info=None if isinstance(error, ProximoError) else error)
    return _SentAwayError(500, "the reward source failed; the service's log says why")


def _patience(request: Request) -> float:
    """For how long the client waits, in seconds, as far as it says so."""
    try:
        return float(request.headers.get(SECONDS_HEADER, "inf"))
    except ValueError:
        raise _SentAwayError(400, f"{SECONDS_HEADER} wants a number of seconds") from None


def _said(error: _SentAwayError) -> Response:
    return JSONResponse({"detail": str(error)}, status_code=error.status, headers=error.headers)
