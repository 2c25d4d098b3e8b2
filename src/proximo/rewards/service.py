"""The ASGI application that serves a reward source: authorisation, admission, scoring.

| path | purpose |
|---|---|
| POST /v1/score | scores responses; messages as in protocol.py |
| POST /v1/check | checks whether responses to some prompts can be scored |
| GET /health | whether the service is up; needs no token |

The server process is commands/serve_reward.py.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proximo.errors import DataError, ProximoError
from proximo.http_service import authorise, read_body
from proximo.rewards.protocol import (
    CHECK_PATH,
    SCHEMA,
    SCORE_PATH,
    SECONDS_HEADER,
    ProtocolError,
    checked_body,
    read_check,
    read_request,
    reply_body,
)
from proximo.rewards.source import CheckingSource, RewardSource

LOG = logging.getLogger("proximo.rewards")
PROBE_BYTES = 200
"""Upper bound of the size of a request without responses."""
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLimits:
    """The load that a service accepts."""

    concurrency: int = 4
    """Requests that are scored concurrently."""
    queue_size: int = 64
    """Requests that may wait for their turn; further ones get status 503."""
    request_bytes: int = 64 * 2**20


class RewardService:
    """Serves the scores of `source`, which must be thread-safe. Clients must send the `token` if there is one."""

    def __init__(self, source: RewardSource, *, limits: ServiceLimits | None = None, token: str | None = None) -> None:
        self.source = source
        self.limits = limits or ServiceLimits()
        self.token = token
        self._threads = ThreadPoolExecutor(self.limits.concurrency, thread_name_prefix="score")
        self._turn = asyncio.Semaphore(self.limits.concurrency)
        self._admitted = 0

    def application(self) -> Starlette:
        """The ASGI application, which a server such as uvicorn runs."""
        return Starlette(
            routes=[
                Route(SCORE_PATH, self.score, methods=["POST"]),
                Route(CHECK_PATH, self.check, methods=["POST"]),
                Route("/health", self.health, methods=["GET"]),
            ],
            exception_handlers={HTTPException: self.refuse},
        )

    def refuse(self, _: Request, error: Exception) -> Response:
        """Logs a refused request and replies with its status and the reason."""
        assert isinstance(error, HTTPException)
        if error.status_code != 500:  # that is logged where it is raised
            level = logging.DEBUG if error.status_code == 503 else logging.WARNING  # a full queue is no fault
            LOG.log(level, "refused a request: status %d, %.300r", error.status_code, error.detail)
        return JSONResponse({"detail": error.detail}, status_code=error.status_code, headers=error.headers)

    async def health(self, _: Request) -> Response:
        """Replies that the service is up, with the version of its format."""
        return JSONResponse({"status": "ok", "format": SCHEMA})

    async def score(self, request: Request) -> Response:
        """Scores the responses of the request."""
        return await self._admit(self._scored, request)

    async def check(self, request: Request) -> Response:
        """Replies with the problem of the first row whose responses cannot be scored."""
        return await self._admit(self._checked, request)

    async def _admit(self, work: Callable[[Request], Awaitable[bytes]], request: Request) -> Response:
        authorise(request, self.token)
        if self._admitted >= self.limits.concurrency + self.limits.queue_size:
            raise HTTPException(503, "too many requests are waiting", {"Retry-After": "1"})
        self._admitted += 1
        try:
            return Response(await work(request), media_type="application/json")
        finally:
            self._admitted -= 1

    async def _scored(self, request: Request) -> bytes:
        start = time.monotonic()
        body = await read_body(request, max_bytes=self.limits.request_bytes)
        if len(body) <= PROBE_BYTES and not _read(read_request, body):
            return reply_body(())  # a probe of the service; it skips the queue
        return await self._run_in_turn(request, start, lambda: self._score(body))

    async def _checked(self, request: Request) -> bytes:
        start = time.monotonic()
        body = await read_body(request, max_bytes=self.limits.request_bytes)
        return await self._run_in_turn(request, start, lambda: self._problem(body))

    async def _run_in_turn(self, request: Request, start: float, work: Callable[[], Result]) -> Result:
        seconds = _client_timeout(request)
        async with self._turn:
            if time.monotonic() - start >= seconds:
                raise HTTPException(503, "the client's time ran out in the queue", {"Retry-After": "1"})
            # Shielded, because work cannot be interrupted: a client that retries would find the same worker busy.
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, work))

    def _score(self, body: bytes) -> bytes:
        """Scores a request, in a thread. An exception of the source is logged and becomes status 500."""
        responses = _read(read_request, body)
        try:
            return reply_body(self.source.score(responses))
        except Exception as error:  # user code may raise anything; only this request fails
            raise _failed(error) from error

    def _problem(self, body: bytes) -> bytes:
        """Checks the rows of a request, in a thread."""
        prompts, origins = _read(read_check, body)
        try:
            if isinstance(self.source, CheckingSource):
                self.source.check_prompts(prompts, origins)
        except DataError as error:
            return checked_body(str(error))
        except Exception as error:
            raise _failed(error) from error
        return checked_body(None)


def _read(read: Callable[[bytes], Result], body: bytes) -> Result:
    try:
        return read(body)
    except ProtocolError as error:
        raise HTTPException(400, str(error)) from None


def _failed(error: Exception) -> HTTPException:
    """Logs the error, with its traceback unless it is a ProximoError, whose message is enough."""
    LOG.error("%s", error, exc_info=None if isinstance(error, ProximoError) else error)
    return HTTPException(500, "the reward source failed; see the log of the service")


def _client_timeout(request: Request) -> float:
    """Seconds for which the client waits; infinite if it sent no header."""
    try:
        return float(request.headers.get(SECONDS_HEADER, "inf"))
    except ValueError:
        raise HTTPException(400, f"{SECONDS_HEADER} must be a number of seconds") from None
