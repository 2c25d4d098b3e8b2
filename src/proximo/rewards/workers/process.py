"""One worker process as the trainer holds it: started apart, spoken to over two pipes, killed as a group.

Not what it is given to do, nor when it is given up: that is pool.py.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from proximo.errors import ProximoError
from proximo.rewards.workers.folders import WorkerFolder
from proximo.rewards.workers.frames import Decoder, encode
from proximo.rewards.workers.outcomes import Work

ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")
"""The variables that a worker gets of the trainer's: none that is known to hold a secret."""
_READ_BYTES = 2**16
REAP_SECONDS = 5.0
"""A process that was killed is gone at once, unless the kernel waits for a device on its behalf."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What workers are made for."""

    service: str
    """A key of `main.SERVICES`."""
    path: str
    """`package.module:name` of the verifier's class, or of the function."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its keyword arguments, plain values."""
    memory_bytes: int | None = None
    """Of the address space of a worker, and of each process that it starts; None for no limit."""
    whole_environment: bool = False
    """All variables of the trainer's: for code of the user's own, which may need its keys."""


class WorkerProcess:
    """A process in a session of its own, with the pieces of work that were sent to it and not yet answered."""

    def __init__(self, job: Job) -> None:
        """Starts it; it is ready when its first message says so. Raises OSError where none can be started."""
        self._folder = WorkerFolder()
        requests, self.requests = os.pipe()
        self.replies, replies = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "proximo.rewards.workers.main",
                    *map(str, (requests, replies, os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(requests, replies),
                start_new_session=True,
                env=_environment(job, self._folder.path),
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
        self.start_error: ProximoError | None = None
        """Why it could not be made ready, in its own words."""
        self.is_reserved = False
        """It holds a piece of work that is to be alone."""
        self.in_flight: deque[Work] = deque()
        """What it was sent, in the order of its replies: it is at work on the first."""
        self.head_started = time.monotonic()
        """When it began with the first of `in_flight`, or with getting ready; or later, never earlier."""
        self._decoder = Decoder()
        self._unsent = bytearray(
            encode(
                {
                    "service": job.service,
                    "path": job.path,
                    "options": dict(job.options),
                    "memory_bytes": job.memory_bytes,
                }
            )
        )
        self.write()

    @property
    def has_unsent(self) -> bool:
        """True where `write` has something left to write."""
        return bool(self._unsent)

    def send(self, request: bytes) -> None:
        """An encoded message; what the pipe does not take at once waits for `write`."""
        self._unsent += request

    def write(self) -> None:
        """As much as the pipe takes."""
        while self._unsent:
            try:
                del self._unsent[: os.write(self.requests, self._unsent)]
            except BlockingIOError:
                return
            except BrokenPipeError:  # it is dead, which the end of its replies says as well
                self._unsent.clear()

    def read(self) -> Iterator[Any] | None:
        """The messages that have come; None where its end of the pipe is closed."""
        try:
            piece = os.read(self.replies, _READ_BYTES)
        except BlockingIOError:
            return iter(())
        return self._decoder.feed(piece) if piece else None

    def has_died(self) -> bool:
        """True for a process that ended, although something it started may hold its pipe open."""
        if not hasattr(os, "waitid"):
            return False  # there the deadline of its answer finds it
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def dismiss(self) -> None:
        """Let it end by itself when it is done with what it holds."""
        if not self._is_dismissed:
            self._is_dismissed = True
            os.close(self.requests)

    def kill(self) -> str:
        """End it and everything in its group, reap it, and remove its folder; how it ended, in words."""
        # The group is killed before its leader is reaped: until then nobody else can have got its number.
        with suppress(ProcessLookupError, PermissionError):  # it may hold nothing any more but the dead leader
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
            return "was killed, by us where it had closed its pipe"
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _environment(job: Job, folder: str) -> dict[str, str]:
    kept = dict(os.environ) if job.whole_environment else {k: os.environ[k] for k in ENVIRONMENT if k in os.environ}
    return kept | {
        # It sees the modules that the trainer sees, the user's own among them.
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
        "TMPDIR": folder,
        "PYTHONHASHSEED": "0",  # the same order of every set in every worker
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
