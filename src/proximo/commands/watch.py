"""Serves the live page of a run on this machine, to those who know its token. Reads the run's files.

Nothing but the page can be asked for.
"""

import hashlib
import hmac
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NoReturn
from urllib.parse import parse_qs, urlsplit

from proximo.errors import ConfigError, RunFolderError
from proximo.metrics.report.live import LivePage
from proximo.metrics.report.rendering import policy

HOST = "127.0.0.1"
NAMES_OF_THIS_MACHINE = ("127.0.0.1", "localhost")
"""A request under another name comes from a page elsewhere whose name was made to mean this machine (DNS rebinding)."""
TOKEN_BYTES = 16
REQUEST_SECONDS = 10
LOOK_SECONDS = 0.5
NICENESS = 10
"""Beside a run that uses all processors, a tenth of one is left for the page."""
HEADERS = {
    "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def watch(run: Path, *, port: int = 0, wait_seconds: float = 600) -> int:
    """Serve the page of a run, or of a pipeline, until Ctrl-C, and return 0. `port` 0 takes a free one.

    The process takes a low priority, so that it does not slow the run.

    Raises ConfigError for a port that is taken, and RunFolderError if no run is there after `wait_seconds`.
    """
    page = LivePage(run)
    if wait_seconds <= 0 and not page.has_run:
        raise _missing(page, wait_seconds)
    os.nice(NICENESS)
    with suppress(KeyboardInterrupt), serving(page, port=port) as address:
        print(f"{run} is shown at {address} (Ctrl-C ends this; the run goes on)", flush=True)
        _wait_for(page, wait_seconds)
        _until_interrupted()
    return 0


@contextmanager
def serving(page: LivePage, *, port: int = 0) -> Generator[str]:
    """The address at which a page is served, with a new token. Raises ConfigError for a port that is taken."""
    token = _Token()
    try:
        server = _Server((HOST, port), _handler_of(page, token))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"port {port} of {HOST} cannot be used ({error}): give another one, or 0 for a free one"
        ) from error
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}/?token={token.text}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _wait_for(page: LivePage, seconds: float) -> None:
    end = time.monotonic() + seconds
    told = False
    while not page.has_run:
        if time.monotonic() >= end:
            raise _missing(page, seconds)
        if not told:
            print(f"{page.waiting_for}; this waits {seconds:g} s for it", flush=True)
            told = True
        time.sleep(LOOK_SECONDS)


def _missing(page: LivePage, seconds: float) -> RunFolderError:
    return RunFolderError(f"{page.waiting_for}, after {seconds:g} s: check its name, start the run, or raise --wait")


def _until_interrupted() -> NoReturn:
    while True:
        time.sleep(LOOK_SECONDS)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    """A browser that keeps its connection does not keep the process."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Print the traceback of a bug. A browser that has closed its page is none."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # ty: ignore[invalid-argument-type]


class _Token:
    """What a reader of the page must know. It is in the address that was printed; the browser then has it in a cookie.

    Browsers send a cookie to every port of a machine, so each server has one of its own name.
    """

    def __init__(self) -> None:
        self.text = secrets.token_urlsafe(TOKEN_BYTES)
        self._cookie = f"proximo-{hashlib.sha256(self.text.encode()).hexdigest()[:12]}"

    def is_among(self, tokens: Sequence[str], cookies: str) -> bool:
        """Whether it is one of the tokens of an address, or in the header of cookies."""
        pairs = (part.strip().partition("=") for part in cookies.split(";"))
        given = [*tokens, *(value for name, _, value in pairs if name == self._cookie)]
        return any(hmac.compare_digest(each.encode(errors="replace"), self.text.encode()) for each in given)

    def set_cookie(self) -> tuple[str, str]:
        """The header that gives a browser the cookie."""
        return "Set-Cookie", f"{self._cookie}={self.text}; Path=/; HttpOnly; SameSite=Strict"


def _handler_of(page: LivePage, token: _Token) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers `/` with the page and `/state` with what has changed."""

        timeout = REQUEST_SECONDS

        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            options = parse_qs(asked.query)
            if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in NAMES_OF_THIS_MACHINE:
                self._answer(HTTPStatus.FORBIDDEN, "text/plain", f"ask for http://{HOST}, not under another name\n")
            elif not token.is_among(options.get("token", []), self.headers.get("Cookie") or ""):
                self._answer(HTTPStatus.FORBIDDEN, "text/plain", "open the address that `proximo watch` printed\n")
            elif asked.path == "/":
                self._answer(HTTPStatus.OK, "text/html", page.page(), token.set_cookie())
            elif asked.path == "/state":
                state = page.state(options.get("seen", [""])[0], more="more" in options)
                self._answer(HTTPStatus.OK, "application/json", json.dumps(state))
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is nothing but the page at /\n")

        def _answer(self, status: HTTPStatus, kind: str, text: str, *more: tuple[str, str]) -> None:
            body = text.encode("utf-8", errors="replace")
            self.send_response(status)
            for name, value in (*HEADERS.items(), ("Content-Type", f"{kind}; charset=utf-8"), *more):
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def version_string(self) -> str:
            return "proximo"

        def log_message(self, format: str, *args: object) -> None:
            """No line for each request: the page asks every two seconds."""

    return Handler
