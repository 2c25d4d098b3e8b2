"""Sends requests to one HTTP service and classifies the outcome: a reply, worth another attempt, or refused.

Redirects are not followed, and a service on this machine is reached without the proxies of the environment. Requests
run in a separate event loop, because only an event loop can end a request at its deadline at any point, even in the
middle of a header.
"""

import asyncio
import ipaddress
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Literal
from urllib.parse import urlsplit

import httpx2

MAX_REPLY_BYTES = 64 * 2**20
CLOSING_SECONDS = 5.0
DETAIL_SECONDS = 1.0
"""Limit of reading why a service gives an error: the status says enough, and the body may never end."""
TRY_AGAIN = frozenset({408, 425, 429})
"""Statuses besides 5xx that ask for a retry: the request is valid, but the service cannot answer now."""

MIN_TOKEN_CHARACTERS = 16
"""The shortest token accepted for an address that other machines can reach."""
NO_SERVICE_BEHIND = frozenset({502, 503})
"""Statuses of a proxy without a service behind it, or of a service that is starting."""


def is_loopback(host: str) -> bool:
    """True for a host name or address that means this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class UnansweredError(Exception):
    """The request got no usable reply; another attempt may get one."""

    def __init__(
        self,
        reason: str,
        *,
        not_before_seconds: float = 0.0,
        timed_out: bool = False,
        connection: Literal["none", "lost"] | None = None,
    ) -> None:
        super().__init__(reason)
        self.not_before_seconds = not_before_seconds
        """Seconds for which the service asks not to be contacted."""
        self.timed_out = timed_out
        self.connection = connection
        """`none`: no service took the request, as during a restart; `lost`: the service disappeared after taking it."""


class RequestRefusedError(Exception):
    """The service refused the request; a retry would be refused as well."""

    def __init__(self, reason: str, *, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


class HttpClient:
    """Sends requests to one service. Thread-safe; `close` ends its background thread."""

    def __init__(
        self, url: str, *, token: str | None = None, kept_connections: int, advice: Callable[[int], str]
    ) -> None:
        """`url`: unix://PATH is a socket of this machine that HTTP is spoken over.

        `advice`: what to do about a refusal with this status, for the message.
        """
        address = urlsplit(url)
        self.url = url.rstrip("/")
        socket = address.path if address.scheme == "unix" else None
        self._base = self.url if socket is None else "http://localhost"
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=kept_connections)
        self._advice = advice
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx2.AsyncClient(
            timeout=None,  # each request has one deadline instead
            headers=headers,
            follow_redirects=False,
            trust_env=socket is None and not is_loopback(address.hostname or ""),
            verify=address.scheme == "https",  # loading certificates is slow and http needs none
            limits=limits,
            transport=None if socket is None else httpx2.AsyncHTTPTransport(uds=socket, limits=limits),
        )
        self._lock = threading.Lock()
        self._is_closed = False
        self._running: set[asyncio.Task[object]] = set()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="http-requests")
        self._thread.start()

    def send(
        self,
        method: Literal["GET", "POST"],
        path: str,
        body: bytes = b"",
        *,
        seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """The body of the reply, which must have arrived within `seconds`.

        Raises UnansweredError and RequestRefusedError.
        """
        seconds = max(seconds, 0.001)
        with self._lock:
            if self._is_closed:
                raise UnansweredError("the client was closed")
            reply = self._reply(method, path, body, seconds, headers)
            future = asyncio.run_coroutine_threadsafe(reply, self._loop)
        try:
            # _reply has the real limit. This longer one covers an event loop that no longer runs.
            return future.result(seconds + CLOSING_SECONDS)
        except TimeoutError:
            future.cancel()
            raise UnansweredError(f"no complete reply within {seconds:.3g} s", timed_out=True) from None
        except CancelledError:
            raise UnansweredError("the client was closed") from None
        except httpx2.LocalProtocolError:  # its text quotes the header and thus the token
            raise RequestRefusedError(f"no request can be sent to {self.url}: HTTP does not allow this token") from None
        except httpx2.TransportError as error:
            connection = "none" if isinstance(error, httpx2.ConnectError) else "lost"
            raise UnansweredError(f"{type(error).__name__}: {error!s:.200}", connection=connection) from None

    def close(self) -> None:
        """Ends the requests that run, closes the connections and ends the thread; waits CLOSING_SECONDS at most."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(CLOSING_SECONDS)

    def _serve(self) -> None:
        """The work of the thread."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await self._closing.wait()
        for request in (running := [*self._running]):  # not what they started: they end that themselves
            request.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        with suppress(httpx2.TransportError):
            await self._client.aclose()

    async def _reply(
        self, method: str, path: str, body: bytes, seconds: float, headers: Mapping[str, str] | None
    ) -> bytes:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        deadline = self._loop.time() + seconds
        async with (
            asyncio.timeout_at(deadline) as limit,
            self._client.stream(method, self._base + path, content=body, headers=headers) as reply,
        ):
            status = reply.status_code
            if status == httpx2.codes.OK:
                return await _read_body(reply)
            limit.reschedule(None)  # the status is the outcome, whether or not the rest comes in time
            left = min(DETAIL_SECONDS, deadline - self._loop.time())
            detail = "" if 300 <= status < 400 else await _detail(reply, seconds=left)
            if status >= 500 or status in TRY_AGAIN:
                raise UnansweredError(
                    f"status {status}{detail}",
                    not_before_seconds=_retry_after(reply),
                    connection="none" if status in NO_SERVICE_BEHIND else None,
                )
            raise RequestRefusedError(
                f"{self.url} refuses with status {status}{detail}: {self._advice(status)}", status=status
            )


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


async def _detail(reply: httpx2.Response, *, seconds: float) -> str:
    """The service's description of its error as one line, if it arrives within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            body = await _read_body(reply)
    except (TimeoutError, UnansweredError, httpx2.TransportError):
        return ""
    text = " ".join(body.decode("utf-8", "replace").split())
    return f" ({text:.200})" if text.isprintable() and text else ""
