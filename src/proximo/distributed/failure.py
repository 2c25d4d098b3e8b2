"""What ended a run of several ranks: its record in the store, its traceback, its message, and whether a process lives.

The first process that knows the reason writes the record for all.
"""

import json
import os
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from proximo.errors import ProximoError, redacted

FAILURE = "failure"
"""Key of the record. It is written once, so that later failures do not replace the first."""
PRINTED = "printed"
"""Key that the process sets which prints the message."""
MOST_CHARACTERS = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why the ranks end."""

    rank: int | None
    """The rank that failed or disappeared; None for the process that started the ranks."""
    message: str
    status: int = 1
    """The exit status of every rank."""
    is_alive: bool = False
    """Whether that rank still runs, and can print what happened to it."""

    def encode(self) -> str:
        """This failure as JSON, its message cut to `MOST_CHARACTERS`."""
        return json.dumps(asdict(self) | {"message": self.message[:MOST_CHARACTERS]})

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """The failure that `encode` wrote as JSON."""
        return cls(**json.loads(text))


def status_of(error: BaseException) -> int:
    """The exit status of a process that ends with this exception."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_status if isinstance(error, ProximoError) else 1


def keep_traceback(error: BaseException, path: Path | None) -> str:
    """Append an exception's traceback to a file, and return how its message is to end.

    Without a file the message has the traceback, unless the error explains itself.
    """
    text = redacted("".join(traceback.format_exception(error)))
    if path is None:
        return "" if isinstance(error, ProximoError) else f"\n{text}"
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as refused:
        return f" (its traceback could not be written: {refused})\n{text}"
    return f"; its traceback is in {path}"


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
