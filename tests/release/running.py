"""Runs commands with a deadline, and without a network: for the check of a release."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ALONE = ("unshare", "--net") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--net")
"""A command after these has no network, not even the loopback. Root stays itself, since tests give files away."""
LOOPBACK = """
import fcntl, os, socket, struct, sys
SET_FLAGS, UP = 0x8914, 0x1  # SIOCSIFFLAGS, IFF_UP
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", UP))
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""After ALONE, `python -c LOOPBACK command` has the loopback: tests serve rewards to themselves on it."""


class Failed(Exception):
    """A command of the check failed. The message has its output."""


class Deadline:
    """Seconds that all commands of one combination share."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        return max(self._end - time.monotonic(), 0.0)


def run(
    command: Sequence[str | Path], *, cwd: Path, deadline: Deadline, environment: Mapping[str, str] | None = None
) -> str:
    """Standard output of a command. Raises Failed if it fails or is not done by the deadline."""
    words = [str(part) for part in command]
    shown = " ".join(word if "\n" not in word else "..." for word in words)
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=None if environment is None else dict(environment),
            capture_output=True,
            text=True,
            check=False,
            timeout=deadline.seconds_left,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{shown} was not done when the time for this combination was over") from error
    if done.returncode != 0:
        raise Failed(f"{shown} ended with {done.returncode}\n{(done.stdout + done.stderr)[-6000:]}")
    return done.stdout


def why_not_alone() -> str | None:
    """Why a command cannot be run without a network here; None if it can."""
    if sys.platform != "linux":
        return "only Linux can take the network from one command"
    try:
        run([*ALONE, "true"], cwd=Path.cwd(), deadline=Deadline(10))
    except FileNotFoundError:
        return "unshare (util-linux) is not installed"
    except Failed as failure:
        return str(failure).strip().replace("\n", ": ")
    return None
