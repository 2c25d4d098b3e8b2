"""Processes of this machine, their standard error, and the signals that end a run."""

import os
import signal
from pathlib import Path

from proximo.errors import redacted

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a run after its step. SIGHUP comes from a terminal that was closed."""
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Further such signals: job scripts let their scheduler send one before the time limit."""


def heeded_signals() -> list[signal.Signals]:
    """The signals that end a run after its step, without those that this process handles otherwise.

    A parent may have ignored one, as `nohup` does with SIGHUP, and a program may have its own handler for SIGUSR1 or 2.
    """
    stops = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return stops + [number for number in USER_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]


def say(text: str) -> None:
    """Write a line to the standard error of the process, even if Python's stream was replaced."""
    os.write(2, f"{redacted(text)}\n".encode())


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0][:300]


def process_table() -> str:
    """The name of this process table: equal for processes that share one."""
    try:
        table = os.readlink("/proc/self/ns/pid")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"process {os.getpid()}"  # no other one compares equal
    return f"{boot} {table}"


def is_alive(process: int) -> bool:
    """Whether a process of this process table exists, running or stopped."""
    return _state(process) not in ("", "Z", "X")


def is_stopped(process: int) -> bool:
    """Whether a signal stopped a process of this process table (SIGSTOP, Ctrl-Z), so that it cannot end by itself."""
    return _state(process) == "T"


def _state(process: int) -> str:
    """The state letter that `ps` shows; empty if there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""
