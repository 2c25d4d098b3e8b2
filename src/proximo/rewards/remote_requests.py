"""One request to a reward service, and what its outcome means: grades, try again, or never. Not how often: remote.py.

Redirects are not followed, and a service on this machine is reached without the environment's proxies. Requests run in
an event loop of their own: it alone can end one at its deadline wherever it stands, also in the middle of a header.
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
    OtherSchemaError,
    WireError,
    read_checked,
    read_reply,
)

MAX_REPLY_BYTES = 64 * 2**20
CLOSING_SECONDS = 5.0
Answer = TypeVar("Answer")
TRY_AGAIN = frozenset({408, 425, 429})
"""Beside 500 and above: the request is fine, and the service cannot answer it now."""


class UnansweredError(Exception):
    """No usable answer; another attempt may get one."""

    def __init__(self, reason: str, *, not_before_seconds: float = 0.0, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.not_before_seconds = not_before_seconds
        """For how long the service asks to be left alone."""
        self.timed_out = timed_out


class RefusedError(Exception):
    """The service says that the request is wrong: no attempt will get an answer."""

    def __init__(self, reason: str, *, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


class Requests:
    """Connections to one service; from any number of threads. `close` ends its own thread."""

    def __init__(self, url: str, *, token: str | None, token_env: str | None, kept_connections: int) -> None:
        """`token_env` names where the token came from, for messages."""
        address = urlsplit(url)
        self.url = url.rstrip("/")
        self.token_env = token_env
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx2.AsyncClient(
            timeout=None,  # the deadline is one for all of a request
            headers=headers,
            follow_redirects=False,
            trust_env=not is_loopback(address.hostname or ""),
            verify=address.scheme == "https",  # for http no certificates need be read
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=kept_connections),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="reward-requests")
        self._thread.start()

    def ask(self, body: bytes, responses: Sequence[Response], *, seconds: float) -> list[Scored]:
        """The grades on `responses`, which `body` asks for, within `seconds`.

        Raises UnansweredError and RefusedError.
        """
        return self._post(SCORE_PATH, body, lambda reply: read_reply(reply, responses), seconds=seconds)

    def check(self, body: bytes, *, seconds: float) -> str | None:
        """What is wrong with a row of `body`, or None. As `ask`; a service that checks no rows refuses with 404."""
        return self._post(CHECK_PATH, body, read_checked, seconds=seconds)

    def _post(self, path: str, body: bytes, read: Callable[[bytes], Answer], *, seconds: float) -> Answer:
        seconds = max(seconds, 0.001)
        asked = asyncio.run_coroutine_threadsafe(self._reply(path, body, seconds), self._loop)
        try:
            # The limit is within; the longer one is for a thread of requests that does nothing any more.
            return read(asked.result(seconds + CLOSING_SECONDS))
        except TimeoutError:
            asked.cancel()
            raise UnansweredError(f"no whole answer within {seconds:.3g} s", timed_out=True) from None
        except httpx2.LocalProtocolError:  # its text quotes the header, and so the token
            raise RefusedError(f"no request can be sent to {self.url}: the token is not one that HTTP allows") from None
        except httpx2.TransportError as error:
            raise UnansweredError(f"{type(error).__name__}: {error!s:.200}") from None
        except OtherSchemaError as error:
            raise RefusedError(f"the service at {self.url} cannot be understood: {error}; use one version") from None
        except WireError as error:
            raise UnansweredError(f"the service answered nonsense: {error}") from None

    async def _reply(self, path: str, body: bytes, seconds: float) -> bytes:
        headers = {SECONDS_HEADER: f"{seconds:.3f}"}
        async with (
            asyncio.timeout(seconds),
            self._client.stream("POST", self.url + path, content=body, headers=headers) as reply,
        ):
            await self._check_status(reply)
            return await _read_body(reply)

    def close(self) -> None:
        """Let go of the connections, for CLOSING_SECONDS at most, and of the thread."""
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
        said = "" if 300 <= status < 400 else _detail(await _read_body(reply))
        raise RefusedError(f"{self.url} refuses with status {status}{said}: {self._advice(status)}", status=status)

    def _advice(self, status: int) -> str:
        if status in (401, 403):
            if self.token_env is None:
                return "it wants a token: name in token_env the environment variable that has it"
            return f"the token in the environment variable {self.token_env} is not the service's"
        if 300 <= status < 400:
            return "redirects are not followed: give the address that it leads to as url"
        if status == 413:
            return "lower responses_per_request, or raise the service's limit"
        return "is url the address of a reward service (`proximo serve-reward`), of this version?"


def _retry_after(reply: httpx2.Response) -> float:
    """Seconds that the service wants to be left alone; its other form, a date, is not read."""
    said = reply.headers.get("Retry-After", "")
    return float(said) if said.isascii() and said.isdigit() else 0.0


async def _read_body(reply: httpx2.Response) -> bytes:
    """The whole body. Raises UnansweredError for one that is too long or compressed."""
    if reply.headers.get("Content-Encoding", "identity") != "identity":
        raise UnansweredError("the service answered nonsense: a compressed body, which was not asked for")
    body = bytearray()
    async for piece in reply.aiter_raw():
        body += piece
        if len(body) > MAX_REPLY_BYTES:
            raise UnansweredError(f"the service answered nonsense: more than {MAX_REPLY_BYTES} bytes")
    return bytes(body)


def _detail(body: bytes) -> str:
    """What a service says of its refusal, as one line."""
    text = " ".join(body.decode("utf-8", "replace").split())
    return f" ({text:.200})" if text.isprintable() and text else ""
