"""The client of a fork server: starts it, exchanges messages with it, ends it."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from proximo_verifiers.errors import SandboxError
from proximo_verifiers.sandbox.kernel.syscalls import architecture
from proximo_verifiers.sandbox.packages import find_packages

ANSWER_SECONDS = 300.0
"""Time for the fork server to start or to reply. It takes a second, and on an overloaded machine minutes."""
END_SECONDS = 10.0
MAX_MESSAGE_BYTES = 1 << 16
BOOT = """
import sys, types
package = types.ModuleType("proximo_verifiers")
package.__path__ = [f"/proc/self/fd/{sys.argv[1]}"]
sys.modules["proximo_verifiers"] = package
from proximo_verifiers.sandbox.inside.entry import main
main(sys.argv[1:])
"""
"""Imports this package without its `__init__.py`, which needs installed packages.

The package is reached through a descriptor, so that nothing that a program can read (frames, modules, arguments)
reveals its path.
"""
ENVIRONMENT = {
    **{"PATH": "", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC0", "PYTHONUTF8": "1"},
    # Sets have the same order in every run.
    **{"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
}
"""The whole environment of a program, except HOME and TMPDIR."""
LINKING = {"LD_BIND_NOW": "1"}
"""Environment of the start of the fork server only: symbols are bound once instead of in every program."""


class ForkServerClient:
    """A running fork server. Raises SandboxError if it cannot be started."""

    def __init__(self, *, without: Collection[str], preload: Sequence[str], modules: Collection[str]) -> None:
        packages = find_packages(modules)
        try:
            architecture()
        except OSError as error:
            raise SandboxError(f"{error}; run what needs it on such a machine (docs/sandbox.md)") from None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {
            **{"without": sorted(without), "preload": list(preload), "forget": list(LINKING)},
            **{"modules": list(modules), "packages": packages, "folders": tempfile.gettempdir()},
        }
        self.control = ours
        package = os.open(Path(__file__).parents[1], os.O_PATH | os.O_CLOEXEC)
        try:
            self.process = subprocess.Popen(
                [os.path.realpath(sys.executable), "-s", "-S", "-P", "-c", BOOT, str(package), str(theirs.fileno())],
                env=ENVIRONMENT | LINKING,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[package, theirs.fileno()],
                start_new_session=True,
            )
        finally:
            os.close(package)
            theirs.close()
        with suppress(OSError):
            self.send(order)
        hello = self.receive(time.monotonic() + ANSWER_SECONDS)
        if hello is None:
            raise SandboxError(f"the sandbox could not be started: {self.end()}")
        self.hello = hello

    @property
    def alive(self) -> bool:
        """True while the connection is open."""
        return self.control.fileno() >= 0

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Sends a message with descriptors. Raises OSError if the server has ended."""
        socket.send_fds(self.control, [json.dumps(message).encode()], descriptors)

    def receive(self, deadline: float) -> dict[str, Any] | None:
        """The next message; None if the server has ended or sends nothing until the deadline."""
        ready, _, _ = select.select([self.control], [], [], max(0.0, deadline - time.monotonic()))
        try:
            message = self.control.recv(MAX_MESSAGE_BYTES) if ready else b""
        except OSError:
            return None
        return json.loads(message) if message else None

    def end(self) -> str:
        """Ends the server and all its programs. Returns the end of its standard error."""
        self.control.close()
        try:
            _, errors = self.process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            try:
                _, errors = self.process.communicate(timeout=END_SECONDS)
            except subprocess.TimeoutExpired as late:  # a process outside of its group holds the pipe open
                errors = late.stderr or b""
                if self.process.stderr is not None:
                    self.process.stderr.close()
        return errors.decode(errors="replace").strip()[-2000:] or f"it ended with status {self.process.returncode}"
