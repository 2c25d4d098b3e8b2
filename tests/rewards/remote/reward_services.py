"""Reward services for tests: the real one in a process of its own, and ones that behave as they are told."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proximo.rewards.protocol import SCHEMA
from proximo.rewards.remote import RemoteReward
from waiting import LATEST_SECONDS

OPENED: list[RemoteReward] = []
"""Sources of the running test, which conftest.py closes."""

REWARD_FILE = '''
"""The reward of the tests' services. Asked to wait, it writes a file, and does until there is another one."""
import pathlib
import time

def score(prompts, responses, metadata):
    return [one(text, facts) for text, facts in zip(responses, metadata)]

def one(text, facts):
    if text.startswith("wait"):
        pathlib.Path(text.replace(" ", "_")).touch()
        while not pathlib.Path("go_on").exists():
            time.sleep(0.01)
    if text == "unknown":
        return float("nan")
    if text == "parts":
        return {"token_rewards": [0.5] * len(facts["token_ids"]), "part": 1}
    return {"score": len(text) + len(facts["token_ids"]) / 8, "right": float(facts.get("answer") == text)}
'''
RECIPE = """
reward:
- {kind: function, name: mine, function: 'service_reward:score', weight: 2}
- {kind: pattern, name: graded, pattern: '[a-m]$', workers: 1}
"""


@dataclass(frozen=True)
class Service:
    """A `proximo serve-reward` that runs."""

    process: subprocess.Popen[str]
    url: str


def make_folder(folder: Path) -> Path:
    (folder / "service_reward.py").write_text(REWARD_FILE)
    (folder / "rewards.yaml").write_text(RECIPE)
    return folder


START_SECONDS = 600.0


@contextmanager
def real_service(folder: Path, *arguments: str, port: int = 0, **environment: str) -> Iterator[Service]:
    """Started in `folder`, which `make_folder` made; killed at the end if it still runs."""
    command = [sys.executable, "-m", "proximo", "serve-reward", "rewards.yaml", "--port", str(port), *arguments]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield Service(process, _address(process))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    """What the service prints once it listens; before that it says what it loads."""
    assert process.stdout is not None
    end = threading.Timer(START_SECONDS, process.kill)
    end.start()
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"at (http://\S+)", line):
                return found[1]
    finally:
        end.cancel()
    raise AssertionError("".join(said))


Behaviour = Callable[[socket.socket, int], Any]
"""What is done with a connection on which that many responses were asked about."""


class ScriptedService:
    """Answers one request after the other as it is told, the last behaviour for all that come after.

    Requests to check rows are not among them: `check` answers those, by default as a service that has no such thing.
    """

    def __init__(self, *behaviours: Behaviour, check: Behaviour | None = None) -> None:
        self.behaviours = behaviours
        self.check = reply(b"", "404 Not Found") if check is None else check
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError):  # the client may have gone
            request = read_http(connection)
            if b" /v1/check " in request.partition(b"\r\n")[0]:
                self.check(connection, 0)
                return
            self.requests.append(request)
            behaviour = self.behaviours[min(len(self.requests), len(self.behaviours)) - 1]
            behaviour(connection, len(json.loads(request.partition(b"\r\n\r\n")[2])["responses"]))

    def __enter__(self) -> "ScriptedService":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for the next connection
        self._accepting.join(LATEST_SECONDS)  # so that a connection that just came is among those that are closed
        for each in (self._listener, *self._open):
            each.close()


def read_http(connection: socket.socket) -> bytes:
    """One request, head and body. Raises ConnectionError where the client goes before it is whole."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += received(connection)
    length = int(re.search(rb"(?i)content-length: (\d+)", data)[1])  # ty: ignore
    while len(data.partition(b"\r\n\r\n")[2]) < length:
        data += received(connection)
    return data


def received(connection: socket.socket) -> bytes:
    piece = connection.recv(65536)
    if not piece:
        raise ConnectionError("the client has gone")
    return piece


def reply(body: bytes, status: str = "200 OK", *headers: str, claimed: int | None = None) -> Behaviour:
    """This status and body; `claimed` is what it says of the body's length."""
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if claimed is None else claimed}", *headers]

    def behave(connection: socket.socket, _: int) -> None:
        connection.sendall("\r\n".join([*head, "Connection: close", "", ""]).encode() + body)
        connection.close()

    return behave


def grades(scores: Sequence[Any], **more: Any) -> bytes:
    found = [{"id": i, "state": "scored", "score": score, **more} for i, score in enumerate(scores)]
    return json.dumps({"format": SCHEMA, "results": found}).encode()


def good(connection: socket.socket, count: int) -> None:
    """A score of 1 for each."""
    reply(grades([1.0] * count))(connection, count)


def silent(connection: socket.socket, _: int) -> None:
    """Accepts, and never answers."""


def hang_up(connection: socket.socket, _: int) -> None:
    connection.close()


def dripping(connection: socket.socket, _: int) -> None:
    """A byte now and then, for ever."""
    drip(connection, b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")


def dripping_headers(connection: socket.socket, _: int) -> None:
    """A header that never ends."""
    drip(connection, b"HTTP/1.1 200 OK\r\nX-Long: ")


def drip(connection: socket.socket, start: bytes) -> None:
    connection.sendall(start)
    while True:
        connection.sendall(b" ")
        threading.Event().wait(0.05)
