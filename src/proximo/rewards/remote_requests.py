"""Sends one request to a reward service and classifies the outcome: results, retry, or refused.

Redirects are not followed, and a service on this machine is reached without the proxies of the environment. Requests
run in an event loop of their own, because only an event loop can end a request at its deadline at any point, even in
the middle of a header.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2

from proximo.config.rewards.addresses import is_loopback
from proximo.records import Response, Scored
from proximo.rewards.protocol import (
    CHECK_PATH,
    SCORE_PATH,
    SECONDS_HEADER,
    ProtocolError,
    ProtocolVersionError,
    read_checked,
    read_reply,
)

MAX_REPLY_BYTES = 64 * 2**20
CLOSING_SECONDS = 5.0
Reply = TypeVar("Reply")
TRY_AGAIN = frozenset({408, 425, 429})
"""Statuses beside 5xx that ask for a retry: the request is valid, but the service cannot answer now."""


class UnansweredError(Exception):
    """The request got no usable reply; another attempt may get one."""

    def __init__(self, reason: str, *, not_before_seconds: float = 0.0, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.not_before_seconds = not_before_seconds
        """Seconds for which the service asks not to be contacted."""
        self.timed_out = timed_out


class RequestRefusedError(Exception):
    """The service refused the request; a retry would be refused as well."""

    def __init__(self, reason: str, *, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


class Requests:
    """Sends requests to one service. Thread-safe; `close` ends its background thread."""

    def __init__(self, url: str, *, token: str | None, token_env: str | None, kept_connections: int) -> None:
        """`token_env` is the environment variable that held the token, for messages."""
        address = urlsplit(url)
        self.url = url.rstrip("/")
        self.token_env = token_env
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx2.AsyncClient(
            timeout=None,  # each request has one deadline instead
            headers=headers,
            follow_redirects=False,
            trust_env=not is_loopback(address.hostname or ""),
            verify=address.scheme == "https",  # loading certificates is slow and http needs none
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=kept_connections),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="reward-requests")
        self._thread.start()

    def ask(self, body: bytes, responses: Sequence[Response], *, seconds: float) -> list[Scored]:
        """The results for `responses`, which are in `body`, within `seconds`.

        Raises UnansweredError and RequestRefusedError.
        """
        return self._post(SCORE_PATH, body, lambda reply: read_reply(reply, responses), seconds=seconds)

    def check(self, body: bytes, *, seconds: float) -> str | None:
        """The problem with a row of `body`, or None. A service that checks no rows refuses with 404.

        Raises UnansweredError and RequestRefusedError.
        """
        return self._post(CHECK_PATH, body, read_checked, seconds=seconds)

    def _post(self, path: str, body: bytes, read: Callable[[bytes], Reply], *, seconds: float) -> Reply:
        seconds = max(seconds, 0.001)
        future = asyncio.run_coroutine_threadsafe(self._reply(path, body, seconds), self._loop)
        try:
            # _reply has the real limit. This longer one covers an event loop that no longer runs.
            return read(future.result(seconds + CLOSING_SECONDS))
        except TimeoutError:
            future.cancel()
            raise UnansweredError(f"no complete reply within {seconds:.3g} s", timed_out=True) from None
        except httpx2.LocalProtocolError:  # its text quotes the header and thus the token
            raise RequestRefusedError(f"no request can be sent to {self.url}: HTTP does not allow this token") from None
        except httpx2.TransportError as error:
            raise UnansweredError(f"{type(error).__name__}: {error!s:.200}") from None
        except ProtocolVersionError as error:
            raise RequestRefusedError(
                f"the service at {self.url} has another protocol version: {error}; use the same version on both sides"
            ) from None
        except ProtocolError as error:
            raise UnansweredError(f"the service sent an invalid reply: {error}") from None

    async def _reply(self, path: str, body: bytes, seconds: float) -> bytes:
        headers = {SECONDS_HEADER: f"{seconds:.3f}"}
        async with (
            asyncio.timeout(seconds),
            self._client.stream("POST", self.url + path, content=body, headers=headers) as reply,
        ):
            await self._check_status(reply)
            return await _read_body(reply)

    def close(self) -> None:
        """Closes the connections, within CLOSING_SECONDS, and ends the thread."""
        if self._loop.is_closed():
            return
        with suppress(TimeoutError, httpx2.TransportError):
            asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result(CLOSING_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _check_status(self, reply: httpx2.Response) -> None:
        status = reply.status_code
        if status == httpx2.codes.OK:
            return
        if status >= 500 or status in TRY_AGAIN:
            raise UnansweredError(f"status {status}", not_before_seconds=_retry_after(reply))
        detail = "" if 300 <= status < 400 else _detail(await _read_body(reply))
        raise RequestRefusedError(
            f"{self.url} refuses with status {status}{detail}: {self._advice(status)}", status=status
        )

    def _advice(self, status: int) -> str:
        if status in (401, 403):
            if self.token_env is None:
                return "it requires a token: set token_env to the environment variable that holds it"
            return f"the token in the environment variable {self.token_env} is not the one of the service"
        if 300 <= status < 400:
            return "redirects are not followed: set url to the final address"
        if status == 413:
            return "lower responses_per_request, or raise the service's limit"
        return "is url the address of a reward service (`proximo serve-reward`) of this version?"


def _retry_after(reply: httpx2.Response) -> float:
    """Seconds in the header Retry-After. Its other form, a date, is ignored."""
    value = reply.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() else 0.0


async def _read_body(reply: httpx2.Response) -> bytes:
    """The body of the reply. Raises UnansweredError if it is too long or compressed."""
    if reply.headers.get("Content-Encoding", "identity") != "identity":
        raise UnansweredError("the service sent an invalid reply: a compressed body")
    body = bytearray()
    async for chunk in reply.aiter_raw():
        body += chunk
        if len(body) > MAX_REPLY_BYTES:
            raise UnansweredError(f"the service sent an invalid reply: more than {MAX_REPLY_BYTES} bytes")
    return bytes(body)


def _detail(body: bytes) -> str:
    """The explanation of a refusal by the service, as one line."""
    text = " ".join(body.decode("utf-8", "replace").split())
    return f" ({text:.200})" if text.isprintable() and text else ""
