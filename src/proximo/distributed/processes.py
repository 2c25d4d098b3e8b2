"""Processes of this machine, their standard error, and the signals that end a run."""

import os
import signal
from pathlib import Path

from proximo.errors import redacted

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""They end a run after its step. The last is that of a terminal which was closed."""
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""They do so too: job scripts have their scheduler send one of them before the time limit."""


def heeded_signals() -> list[signal.Signals]:
    """The signals that end a run after its step, without those for which this process has another use.

    A parent may have one ignored, as `nohup` does with SIGHUP; and a program may have a handler of its own for a user's
    signal.
    """
    stops = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return stops + [number for number in USER_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]


def say(text: str) -> None:
    """A line on standard error, whatever Python's streams are at the moment."""
    os.write(2, f"{redacted(text)}\n".encode())


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return str(error).partition("\n")[0][:300]


def process_table() -> str:
    """A name, the same for processes that share a process table."""
    try:
        table = os.readlink("/proc/self/ns/pid")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"process {os.getpid()}"  # no other one compares equal
    return f"{boot} {table}"


def is_alive(process: int) -> bool:
    """Whether a process of this process table runs, or is stopped."""
    return _state(process) not in ("", "Z", "X")


def is_stopped(process: int) -> bool:
    """Whether a signal stopped a process of this process table (SIGSTOP, Ctrl-Z), so that it cannot end by itself."""
    return _state(process) == "T"


def _state(process: int) -> str:
    """The letter of `ps`; empty where there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""
