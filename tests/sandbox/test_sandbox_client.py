"""The end of a fork server: waited for so long and no longer."""

import os
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from proximo.sandbox import client
from proximo.sandbox.client import ForkServerClient
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
