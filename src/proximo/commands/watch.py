"""Serves the live page of a run on this machine alone. Reads the run's files, and nothing else can be asked for."""

import json
import os
import sys
import threading
import time
from collections.abc import Generator
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
    """The address at which a page is served. Raises ConfigError for a port that is taken."""
    try:
        server = _Server((HOST, port), _handler_of(page))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"port {port} of {HOST} cannot be used ({error}): give another one, or 0 for a free one"
        ) from error
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}/"
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


def _handler_of(page: LivePage) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers `/` with the page and `/state` with what has changed."""

        timeout = REQUEST_SECONDS

        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in NAMES_OF_THIS_MACHINE:
                self._answer(HTTPStatus.FORBIDDEN, "text/plain", f"ask for http://{HOST}, not under another name\n")
            elif asked.path == "/":
                self._answer(HTTPStatus.OK, "text/html", page.page())
            elif asked.path == "/state":
                seen = parse_qs(asked.query).get("seen", [""])[0]
                self._answer(HTTPStatus.OK, "application/json", json.dumps(page.state(seen)))
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is nothing but the page at /\n")

        def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
            body = text.encode("utf-8", errors="replace")
            self.send_response(status)
            for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def version_string(self) -> str:
            return "proximo"

        def log_message(self, format: str, *args: object) -> None:
            """No line for each request: the page asks every two seconds."""

    return Handler
