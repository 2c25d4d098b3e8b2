"""What a program of the tables is, and what must be true of it. No pytest: the battery runs under any interpreter."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from proximo_verifiers.sandbox.jobs import MIB, Ending, Limits, Outcome

PRELUDE = """
import ctypes, os, sys

def refused(what, action, *arguments):
    try:
        result = action(*arguments)
    except (OSError, ImportError, RuntimeError, ValueError, MemoryError) as error:
        print("refused", what)
        return
    print("BROKEN", what, result)

def syscall(x86, arm, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    number = arm if os.uname().machine == "aarch64" else x86
    passed = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = libc.syscall(ctypes.c_long(number), *passed)
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return result
"""
SECRET = "the-secret-of-the-host"
TOKEN = "proximo-escape"
"""Part of every name that a hostile program gives to what it tries to leave behind."""
QUICK = Limits(cpu_seconds=2.0, wall_seconds=200.0, memory_bytes=256 * MIB, scratch_bytes=4 * MIB, output_bytes=1 << 16)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program, and what must hold. `PLACES` in capitals are replaced by what the host has set up."""

    name: str
    source: str
    attempts: int | None = None
    """How many lines it prints, each of which must begin with `refused`."""
    stdout: str | None = None
    endings: tuple[Ending, ...] = (Ending.EXIT,)
    status: int | None = 0
    limits: Limits = QUICK
    files: Mapping[str, bytes] = field(default_factory=dict)
    stdin: bytes = b""
    needs: str | None = None
    """The guarantee without which it is not run."""
    machine: str | None = None
    """The only architecture that it is written for."""

    def problems(self, outcome: Outcome) -> list[str]:
        """In what the outcome is not what must be."""
        said = outcome.stdout.decode(errors="replace")
        lines = said.splitlines()
        checks = {
            f"ended by {outcome.ending}": outcome.ending in self.endings,
            f"status {outcome.status}": self.status is None or outcome.status == self.status,
            "got through": "BROKEN" not in said,
            "saw the secret": SECRET not in said + outcome.stderr.decode(errors="replace"),
            "said something else": self.stdout is None or said == self.stdout,
            "did not try it all": self.attempts is None
            or (len(lines) == self.attempts and all(line.startswith("refused") for line in lines)),
            "used more CPU than it may": outcome.cpu_seconds <= self.limits.cpu_seconds + 1.5,
            "said more than it may": max(len(outcome.stdout), len(outcome.stderr)) <= self.limits.output_bytes,
        }
        failed = [what for what, good in checks.items() if not good]
        return [*failed, said[-1500:], outcome.stderr.decode(errors="replace")[-1500:]] if failed else []


def tries(name: str, *attempts: str, before: str = "", needs: str | None = None) -> Case:
    """A program of single expressions, each of which must be refused."""
    lines = [f"refused({index}, lambda: {attempt})" for index, attempt in enumerate(attempts)]
    return Case(name=name, source="\n".join((PRELUDE, before, *lines)), attempts=len(attempts), needs=needs)


def ends(name: str, source: str, *endings: Ending, status: int | None = None, **limits: float) -> Case:
    """A program that must be ended, or end itself, in one of these ways."""
    changed = replace(QUICK, **limits)
    return Case(name=name, source=PRELUDE + source, endings=endings, status=status, limits=changed)


def says(name: str, source: str, stdout: str, *, needs: str | None = None, limits: Limits = QUICK) -> Case:
    """A program that must run to its end and say exactly this."""
    return Case(name=name, source=PRELUDE + source, stdout=stdout, needs=needs, limits=limits)
