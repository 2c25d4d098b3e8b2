"""Connections to a reward service that send no request: they end, and keep nobody out who does."""

import asyncio
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest
import uvicorn
from reward_services import make_folder, real_service
from starlette.responses import JSONResponse

from proximo.commands.serve_options import ServeOptions, check_options
from proximo.errors import ConfigError
from proximo.records import Response, Scored
from proximo.rewards import connections
from proximo.rewards.service import RewardService
from waiting import LATEST_SECONDS, wait_until

HEAD_SECONDS = 0.3


class Nothing:
    """Is never asked."""

    name = "nothing"

    def score(self, responses: list[Response]) -> list[Scored]:
        raise AssertionError(responses)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of a service in this process that is impatient, and has a token that nobody here knows."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", HEAD_SECONDS)
    with served(RewardService(Nothing(), token="unknown" * 3)) as found:
        yield found


@contextmanager
def served(service: RewardService) -> Iterator[int]:
    options = {"http": connections.GuardedConnection, "lifespan": "off", "ws": "none", "log_level": "error"}
    server = uvicorn.Server(uvicorn.Config(service.application(), **options))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(LATEST_SECONDS)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/score HTTP/1.1\r\nHost: a\r\nX-Long: ",
        b"POST /v1/score HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
    ids=["nothing", "half a head", "a body without a token", "a request, and then half of another"],
)
def test_a_connection_that_drips_ends_before_a_token_is_known(port: int, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(0.02)
        connection.sendall(sent)
        wait_until(lambda: not is_open(connection), "the end of the connection")


def is_open(connection: socket.socket) -> bool:
    """Reads what there is, and sends one more byte."""
    try:
        if not connection.recv(65536):
            return False
    except TimeoutError:
        pass
    except ConnectionError:
        return False
    try:
        connection.sendall(b"x")
    except ConnectionError:
        return False
    return True


def test_a_client_that_waits_for_its_answer_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(self: RewardService, _: object) -> JSONResponse:
        await asyncio.sleep(4)
        return JSONResponse({"status": "late"})

    monkeypatch.setattr(connections, "HEAD_SECONDS", 3.0)  # the head itself has these seconds too
    monkeypatch.setattr(RewardService, "health", slow)
    with served(RewardService(Nothing())) as port:
        found = httpx2.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=LATEST_SECONDS)
    assert found.json() == {"status": "late"}


def test_silent_connections_beyond_its_descriptors_do_not_keep_a_client_out(tmp_path: Path) -> None:
    with real_service(make_folder(tmp_path), head_seconds=1000.0) as service, ExitStack() as stack:
        resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (100, 100))
        host, _, port = service.url.removeprefix("http://").rpartition(":")
        for _ in range(150):
            silent = stack.enter_context(socket.create_connection((host, int(port)), timeout=LATEST_SECONDS))
            silent.sendall(b"POST /v1/score HTTP/1.1\r\n")
        found = httpx2.get(f"{service.url}/health", trust_env=False, timeout=LATEST_SECONDS)
        assert found.json()["status"] == "ok"


def test_connections_leave_descriptors_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, expected in ((100, 20), (4, 8), (1024, 944), (10**6, connections.MAX_CONNECTIONS)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert connections.max_connections() == expected


@pytest.mark.parametrize(
    ("host", "length", "taken"), [("0.0.0.0", 15, False), ("0.0.0.0", 16, True), ("127.0.0.1", 1, True)]
)
def test_a_token_that_could_be_guessed_is_refused_where_others_can_try(
    host: str, length: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "k" * length)
    options = ServeOptions(host=host, token_env="REWARD_TOKEN")
    if taken:
        check_options(options)
        return
    with pytest.raises(ConfigError, match="REWARD_TOKEN has 15 characters: it needs 16 or more"):
        check_options(options)
