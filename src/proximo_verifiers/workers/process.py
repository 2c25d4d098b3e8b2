"""A worker process, seen from the parent: starting it, exchanging messages over two pipes, killing its group.

Its temporary folder is locked by the process that made it. The kernel releases the lock when that process ends in any
way, so a folder that can be locked is no longer in use: folders that killed processes left behind are removed.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proximo_verifiers.errors import VerifierError
from proximo_verifiers.workers.frames import FrameDecoder, encode
from proximo_verifiers.workers.services import VERIFIER_SERVICE
from proximo_verifiers.workers.work import Work

ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")
"""Environment variables that a worker inherits. None of them is known to hold a secret."""
_READ_BYTES = 2**16
REAP_SECONDS = 5.0
"""Time for a killed process to end. It takes longer only while the kernel waits for a device on its behalf."""
PREFIX = "proximo-worker-"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """What a worker process runs, and its limits."""

    path: str
    """Import path `package.module:name` of the verifier class, or of what another service is made of."""
    service: str = VERIFIER_SERVICE
    """Import path of the function that makes the service (`services.MakeService`)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class or function, as plain values."""
    memory_bytes: int | None = None
    """Address space limit of a worker, and of each process that it starts; None for no limit."""
    whole_environment: bool = False
    """Inherit all environment variables. For the user's own code, which may need keys from them."""


class WorkerProcess:
    """A process in its own session, with the work that was sent to it and is not yet answered."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Starts the process, which sends a message when it is ready. Raises OSError if it cannot be started."""
        self._folder = WorkerFolder()
        requests, self.requests = os.pipe()
        self.replies, replies = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "proximo_verifiers.workers.main",
                    *map(str, (requests, replies, os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(requests, replies),
                start_new_session=True,
                env=_environment(spec, self._folder.path),
            )
        except OSError:
            os.close(self.requests)
            os.close(self.replies)
            self._folder.remove()
            raise
        finally:
            os.close(requests)
            os.close(replies)
        os.set_blocking(self.requests, False)
        os.set_blocking(self.replies, False)
        self.is_ready = False
        self._is_dismissed = False
        self.start_error: VerifierError | None = None
        """The error that it reported instead of becoming ready."""
        self.is_reserved = False
        """True while it holds isolated work, so that it gets no other."""
        self.in_flight: deque[Work] = deque()
        """The work that it was sent, in the order of its replies. It works on the first."""
        self.head_started = time.monotonic()
        """An upper bound of the time when it began with the first work in `in_flight`, or with getting ready."""
        self._decoder = FrameDecoder()
        self._unsent = bytearray(
            encode(
                {
                    "service": spec.service,
                    "path": spec.path,
                    "options": dict(spec.options),
                    "memory_bytes": spec.memory_bytes,
                }
            )
        )
        self.write()

    @property
    def has_unsent(self) -> bool:
        """True if `write` has bytes left to write."""
        return bool(self._unsent)

    def send(self, request: bytes) -> None:
        """Buffers an encoded message for `write`."""
        self._unsent += request

    def write(self) -> None:
        """Writes as much as the pipe takes without blocking."""
        while self._unsent:
            try:
                del self._unsent[: os.write(self.requests, self._unsent)]
            except BlockingIOError:
                return
            except BrokenPipeError:  # it is dead; the end of its replies shows that as well
                self._unsent.clear()

    def read(self) -> Iterator[Any] | None:
        """The messages that have arrived; None if its end of the pipe is closed."""
        try:
            piece = os.read(self.replies, _READ_BYTES)
        except BlockingIOError:
            return iter(())
        return self._decoder.feed(piece) if piece else None

    def has_died(self) -> bool:
        """True if the process ended, even if a process that it started holds its pipe open."""
        if not hasattr(os, "waitid"):
            return False  # such systems rely on the deadline of the answer
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def dismiss(self) -> None:
        """Closes its requests, so that it ends by itself after the work that it holds."""
        if not self._is_dismissed:
            self._is_dismissed = True
            os.close(self.requests)

    def kill(self) -> str:
        """Kills its process group, reaps it and removes its folder. Returns how it ended, as text."""
        # Kill the group before reaping its leader: the id cannot be reused until the leader is reaped.
        with suppress(ProcessLookupError, PermissionError):  # nothing may be left but the dead leader
            os.killpg(self._process.pid, signal.SIGKILL)
        self.dismiss()
        os.close(self.replies)
        try:
            status = self._process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            return "cannot be ended: the kernel holds it"
        finally:
            self._folder.remove()
        if status == -signal.SIGKILL:
            return "was killed, by this process if it had closed its pipe"
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _environment(spec: WorkerSpec, folder: str) -> dict[str, str]:
    kept = dict(os.environ) if spec.whole_environment else {k: os.environ[k] for k in ENVIRONMENT if k in os.environ}
    return kept | {
        # The worker can import what the parent can, including the user's own modules.
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
        "TMPDIR": folder,
        "PYTHONHASHSEED": "0",  # sets have the same order in every worker
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


class WorkerFolder:
    """A new temporary folder, locked by this process until it is removed."""

    def __init__(self) -> None:
        while True:
            self.path = tempfile.mkdtemp(prefix=PREFIX)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(BlockingIOError):  # another process locked it first, to sweep it away
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(self.path, self._lock):
                    break
            os.close(self._lock)  # it was swept away before it was locked
        # A verifier may run programs as another user, who must reach its files here but need not list the folder.
        os.chmod(self.path, 0o711)

    def remove(self) -> None:
        """Removes the folder with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep_folders() -> None:
    """Removes the folders of workers whose process is gone. Leaves other users' folders and other files alone."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                _remove_if_unused(path)


def _remove_if_unused(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(path, descriptor):
            shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        pass  # its process is alive
    finally:
        os.close(descriptor)


def _is_at(path: str | Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
