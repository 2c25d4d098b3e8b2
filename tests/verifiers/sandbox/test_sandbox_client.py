"""The end of a fork server: waited for so long and no longer."""

import os
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proximo_verifiers.errors import SandboxError
from proximo_verifiers.sandbox import client, runner
from proximo_verifiers.sandbox.client import ForkServerClient
from proximo_verifiers.sandbox.runner import Sandbox
from waiting import LATEST_SECONDS


def test_what_holds_the_pipe_of_a_fork_server_that_was_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "END_SECONDS", 0.2)
    mark = tmp_path / "pid"
    script = f"echo last words >&2; setsid sh -c 'echo $$ > {mark}; exec sleep 1000' & exec sleep 1000"
    made = ForkServerClient.__new__(ForkServerClient)
    made.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.process = subprocess.Popen(["sh", "-c", script], stderr=subprocess.PIPE, start_new_session=True)
    said: list[str] = []
    try:
        while not (mark.exists() and mark.read_text().strip()):
            assert made.process.poll() is None
        thread = threading.Thread(target=lambda: said.append(made.end()), daemon=True)
        thread.start()
        thread.join(LATEST_SECONDS)
    finally:
        theirs.close()
        with suppress(ProcessLookupError):
            os.kill(int(mark.read_text()), signal.SIGKILL)
    assert said == ["last words"]
    assert made.process.poll() is not None


def test_a_fork_server_that_does_not_start_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(client, "END_SECONDS", 0.1)
    monkeypatch.setattr(client, "BOOT", "import time; time.sleep(1000)")
    with pytest.raises(SandboxError, match="the sandbox could not be started"), Sandbox():
        pass


class Silent:
    """A fork server that takes every message and gives so many answers."""

    alive = True

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = [*answers]
        self.deadlines: list[float] = []

    def receive(self, deadline: float) -> dict[str, Any] | None:
        self.deadlines.append(deadline)
        return self.answers.pop(0) if self.answers else None

    def end(self) -> str:
        self.alive = False
        return "last words"


class Started:
    """A program, as far as the waits for its fork server see it."""

    name, limits = "a", SimpleNamespace(wall_seconds=7.0)

    def __init__(self) -> None:
        self.is_over, self.deadline, self.failure = False, 0.0, ""

    def finish(self, *, failure: str) -> None:
        self.is_over, self.failure = True, failure


def sandbox_of(server: Silent, job: Started) -> Any:
    made: Any = Sandbox.__new__(Sandbox)
    made._server, made._jobs = server, {job.name: job}
    return made


def test_a_program_of_a_fork_server_that_does_not_answer_fails_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    server, job = Silent(), Started()
    sandbox_of(server, job)._wait_for_start(job)
    assert job.failure == "the fork server has ended, or does not answer. last words"
    assert server.deadlines == [1000.0 + runner.ANSWER_SECONDS]


def test_a_program_whose_end_is_not_told_is_waited_for_a_grace_beyond_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    server, job = Silent({"started": "a"}), Started()
    made = sandbox_of(server, job)
    made._wait_for_start(job)
    latest = 1000.0 + 7 + runner.GRACE_SECONDS
    seen: list[float] = []

    def serve(deadline: float) -> None:
        assert deadline == latest
        seen.append(now[0])
        now[0] = latest + (len(seen) > 1)

    made._serve = serve
    made.wait_for(job)
    assert seen == [1000.0, latest, latest + 1], "the last one after the failure"
    assert job.failure == "it did not end at its limits. last words"
