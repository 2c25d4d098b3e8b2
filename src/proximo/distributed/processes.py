"""Processes of this machine, and their standard error."""

import os
from pathlib import Path

from proximo.errors import redacted


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
