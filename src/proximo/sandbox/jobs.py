"""What is asked of the sandbox and what it answers: programs, limits, outcomes. Not how a process is confined."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one program may use."""

    cpu_seconds: float = 4.0
    """CPU time of the program, start of the interpreter left out."""
    wall_seconds: float = 40.0
    """From start to end, whatever the machine has else to do."""
    idle_seconds: float | None = None
    """Of those in which it neither runs nor waits for a processor: it sleeps, or waits for something else. None for no
    limit but that of `wall_seconds`."""
    memory_bytes: int = 512 * MIB
    """Of all its memory, what it writes to its folder included."""
    scratch_bytes: int = 16 * MIB
    """Of the files in its folder."""
    output_bytes: int = MIB
    """Of standard output and of standard error, each; a program that writes more is ended."""
    open_files: int = 64
    threads: int = 16
    """At once, the first included; there are no other processes. Where a machine cannot count the threads of one
    program there is the first only."""

    def exceeded(self, *, cpu_seconds: float, wall_seconds: float, idle_seconds: float) -> "Ending | None":
        """The limit of time that this exceeds, whoever was quicker: the program's end, or who was to end it."""
        if cpu_seconds >= self.cpu_seconds:
            return Ending.CPU
        if wall_seconds >= self.wall_seconds:
            return Ending.WALL
        return Ending.IDLE if self.idle_seconds is not None and idle_seconds >= self.idle_seconds else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A Python program and what it is given. It runs as `__main__` in an empty folder of its own."""

    source: str
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Name -> contents, put into its folder."""
    descriptors: Mapping[int, int] = field(default_factory=dict)
    """Number in the program -> open descriptor of the caller's (a pipe or a socket), 3 and up; the rest is closed."""
    limits: Limits = field(default_factory=Limits)


class Ending(StrEnum):
    """How a program ended. Only `EXIT` with status 0 is a program that ran to its end."""

    EXIT = "exit"
    SIGNAL = "signal"
    CPU = "cpu_limit"
    WALL = "wall_limit"
    IDLE = "idle_limit"
    MEMORY = "memory_limit"
    OUTPUT = "output_limit"
    SCRATCH = "scratch_limit"
    """Where its folder is watched; where it is a file system of its own, writing fails."""
    KILLED = "killed"
    """By its caller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a program. Everything here was seen from outside of it.

    A limit that was exceeded is the ending, also of a program that came to its own end before it was stopped: it counts
    what the program used, not who was quicker. What the kernel refuses at once (memory, files, threads, processes) is
    no ending by itself: the program meets it where it asks.
    """

    ending: Ending
    status: int
    """Exit status, or the number of the signal."""
    stdout: bytes
    stderr: bytes
    cpu_seconds: float
    wall_seconds: float
    idle_seconds: float
    lost_seconds: float | None
    """Waited for a processor by the program, or by those who serve it; None where the kernel does not count it."""


class Job(Protocol):
    """A program that runs."""

    name: int
    """By which its runner knows it."""

    def wait(self) -> Outcome:
        """Waits for its end, for `limits.wall_seconds` at most; nothing of the program is left after it."""
        ...

    def kill(self) -> None:
        """Ends it and whatever it started; `wait` then says so. May be called while another thread waits."""
        ...


class Runner(Protocol):
    """Starts programs, confined. Several may run at once. Used from one thread."""

    def start(self, program: Program, *, helps: Job | None = None) -> Job:
        """Raises SandboxError where no program can be started. While it works, a program that it `helps` is not
        idle."""
        ...

    def close(self) -> None:
        """Ends every program that still runs."""
        ...
