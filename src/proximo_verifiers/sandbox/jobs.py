"""The interface of the sandbox: programs, limits, outcomes, and the protocols of runners."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The resources that a program may use."""

    cpu_seconds: float = 4.0
    """CPU seconds of the program, without the start of the interpreter."""
    wall_seconds: float = 40.0
    """Wall-clock seconds from start to end."""
    idle_seconds: float | None = None
    """Seconds in which the program neither runs nor waits for a processor, for example in a sleep; None for no
    limit."""
    memory_bytes: int = 512 * MIB
    """Bytes of memory, including the files in its folder."""
    scratch_bytes: int = 16 * MIB
    """Bytes of the files in its folder."""
    output_bytes: int = MIB
    """Bytes of standard output and of standard error, each. A program that writes more is killed."""
    open_files: int = 64
    threads: int = 16
    """Threads at a time, including the first. On a machine that cannot count the threads of one program the limit is
    1."""

    def exceeded(self, *, cpu_seconds: float, wall_seconds: float, idle_seconds: float) -> "Ending | None":
        """The time limit that these times exceed, or None, even if the program ended before it was killed."""
        if cpu_seconds >= self.cpu_seconds:
            return Ending.CPU
        if wall_seconds >= self.wall_seconds:
            return Ending.WALL
        return Ending.IDLE if self.idle_seconds is not None and idle_seconds >= self.idle_seconds else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A Python program and its inputs. It runs as `__main__` in an empty folder of its own."""

    source: str
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Maps names of files in its folder to their contents."""
    descriptors: Mapping[int, int] = field(default_factory=dict)
    """Maps descriptor numbers in the program, from 3, to open pipes or sockets of the caller. Others are closed."""
    limits: Limits = field(default_factory=Limits)


class Ending(StrEnum):
    """How a program ended. Only `EXIT` with status 0 means that it ran to its end."""

    EXIT = "exit"
    SIGNAL = "signal"
    CPU = "cpu_limit"
    WALL = "wall_limit"
    IDLE = "idle_limit"
    MEMORY = "memory_limit"
    OUTPUT = "output_limit"
    SCRATCH = "scratch_limit"
    """Only if its folder is watched. In a file system of its own, writing fails instead."""
    KILLED = "killed"
    """The caller killed it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a program, as observed from outside of it.

    A program that exceeded a limit has that ending, even if it ended by itself before it was killed: what it used
    decides, not a race. Limits that the kernel enforces (memory, files, threads, processes) are no ending by
    themselves; a request beyond them fails in the program.
    """

    ending: Ending
    status: int
    """Exit status, or signal number."""
    stdout: bytes
    stderr: bytes
    cpu_seconds: float
    wall_seconds: float
    idle_seconds: float
    lost_seconds: float | None
    """Seconds in which the program, or the processes that serve it, waited for a processor. None if not counted."""


class Job(Protocol):
    """A running program, as the caller of the sandbox sees it."""

    name: int
    """The number by which its runner identifies it."""

    def wait(self) -> Outcome:
        """Waits until the program has ended, for about `limits.wall_seconds` at most."""
        ...

    def kill(self) -> None:
        """Kills the program; `wait` then reports it. May be called while another thread waits."""
        ...


class Runner(Protocol):
    """Starts confined programs, several at a time. To be used from one thread."""

    def start(self, program: Program, *, helps: Job | None = None) -> Job:
        """Starts a program. While it is busy, the program that it `helps` does not count as idle.

        Raises SandboxError if no program can be started.
        """
        ...

    def close(self) -> None:
        """Ends every running program."""
        ...
