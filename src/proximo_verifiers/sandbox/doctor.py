"""Tests each guarantee of the sandbox on this machine by a program that tries to break it.

The programs are quick checks; the tests have many more. `python -m proximo_verifiers.sandbox.doctor [--waive NAME]
[--json]` prints the findings.
"""

import argparse
import json
import os
import select
import sys
import tempfile
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from proximo_verifiers.errors import VerifierError
from proximo_verifiers.sandbox.guarantees import GUARANTEES, NAMES, check_names
from proximo_verifiers.sandbox.jobs import MIB, Ending, Limits, Outcome, Program
from proximo_verifiers.sandbox.mechanisms import Mechanisms
from proximo_verifiers.sandbox.runner import Sandbox

LIMITS = Limits(cpu_seconds=2.0, wall_seconds=10.0, memory_bytes=256 * MIB, scratch_bytes=4 * MIB, output_bytes=1 << 16)
PRELUDE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def refused(action, *arguments):
    try:
        result = action(*arguments)
    except (OSError, RuntimeError):
        return
    print("got through:", action, result)
def call(*numbers):
    if libc.syscall(*map(ctypes.c_long, numbers)) == -1:
        raise OSError
"""
SCAN = """
import gc, re
pwrite = libc.pwrite
pwrite.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long)
copy = os.open("page", os.O_CREAT | os.O_RDWR)
for place in {id(each) >> 24 for each in gc.get_objects()} | {ctypes.addressof(ctypes.create_string_buffer(9)) >> 24}:
    for address in range(place << 24, (place + 1) << 24, 65536):
        taken = pwrite(copy, address, 65536, 0)
        if taken > 0:
            for found in re.findall(rb"secret-of-a-program-[0-9a-f]+", os.pread(copy, taken, 0)):
                print("got through:", found)
"""
SECRET_PROGRAM = "known = 'secret-of-a-program-0123456789abcdef'"
"""Runs before the program that searches memory for the secret."""
CANARY = "PROXIMO_DOCTOR_CANARY"


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A program that tries to break a guarantee. In its source `FILE` is a file of the host and `PROCESS` a process
    id."""

    source: str
    endings: tuple[Ending, ...] = (Ending.EXIT,)
    limits: Limits = LIMITS

    def program(self, *, file: str, process: int, held_open: int) -> Program:
        """The program with names filled in. The descriptor `held_open` becomes number 3."""
        source = self.source.replace("FILE", repr(file)).replace("PROCESS", str(process))
        return Program(source=PRELUDE + source, limits=self.limits, descriptors={3: held_open})

    def problem(self, outcome: Outcome) -> str | None:
        """How the guarantee was broken; None if it held."""
        if outcome.ending not in self.endings:
            said = outcome.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            return f"the program that tries it ended by {outcome.ending.value} {outcome.status}: {said}"[:300]
        said = outcome.stdout.decode(errors="replace").strip() if outcome.ending is Ending.EXIT else ""
        return said[:300] or None


PROBES = {
    "network": Probe(
        source="""
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
    refused(socket.socket, family, socket.SOCK_DGRAM if family != 16 else socket.SOCK_RAW)
"""
    ),
    "reading": Probe(
        source="for path in (FILE, '/etc/passwd', '/proc/self/environ', '/usr/bin'): refused(os.open, path, 0)"
    ),
    "names": Probe(
        source="print(*(f'got through: {path}' for path in (FILE, '/etc/passwd', '/proc') if os.path.lexists(path)))"
    ),
    "writing": Probe(
        source="""
refused(os.open, FILE, os.O_WRONLY | os.O_APPEND)
refused(os.open, FILE + ".more", os.O_WRONLY | os.O_CREAT)
refused(os.open, os.__file__, os.O_WRONLY)
for change in (os.unlink, os.rmdir, lambda path: os.chmod(path, 0), lambda path: os.utime(path, (0, 0))):
    refused(change, FILE)
"""
    ),
    "scratch": Probe(
        source="""
import time
def fill():
    for number in range(32):
        with open(f"file{number}", "wb", buffering=0) as file:
            if file.write(bytes(1 << 20)) < 1 << 20: raise OSError
    time.sleep(1)
refused(fill)
""",
        endings=(Ending.EXIT, Ending.SCRATCH),
    ),
    "cpu": Probe(source="while True: pass", endings=(Ending.CPU,), limits=replace(LIMITS, cpu_seconds=0.1)),
    "wall": Probe(
        source="import time\ntime.sleep(60)", endings=(Ending.WALL,), limits=replace(LIMITS, wall_seconds=0.1)
    ),
    "memory": Probe(source="taken = [bytearray(1 << 20) for _ in range(512)]", endings=(Ending.MEMORY,)),
    "processes": Probe(source="refused(os.fork)\nrefused(os.execv, '/bin/sh', ['sh'])\nrefused(os.memfd_create, 'x')"),
    "threads": Probe(
        source=f"""
import threading, time
threading.stack_size(65536)
def start():
    for _ in range({LIMITS.threads}): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
refused(start)
"""
    ),
    "files": Probe(source=f"refused(lambda: [os.dup(1) for _ in range({LIMITS.open_files})])"),
    "output": Probe(source="while True: os.write(1, bytes(1 << 16))", endings=(Ending.OUTPUT,)),
    "environment": Probe(
        source="""
print(*(f"got through: {name}" for name in os.environ if "PROXIMO" in name))
for number in range(4, 1024): refused(os.fstat, number)
"""
    ),
    "memory_of_others": Probe(source=SCAN),
    "signals": Probe(
        source="""
for process in (PROCESS, os.getppid(), 1, 0, -1): refused(os.kill, process, 0)
refused(call, 117 if os.uname().machine == "aarch64" else 101, 16, PROCESS, 0, 0)
"""
    ),
    "survivors": Probe(
        source="""
import time
try:
    if os.fork() == 0: time.sleep(5)
except OSError:
    pass
"""
    ),
    "privileges": Probe(
        source="""
arm = os.uname().machine == "aarch64"
for x86, number in ((272, 97), (321, 280), (425, 425), (250, 219), (298, 241), (155, 41), (308, 268)):
    refused(call, number if arm else x86, 0x10000000, 0, 0, 0, 0)
refused(os.setuid, 0)
refused(os.chroot, ".")
"""
    ),
}
"""The probe of each guarantee. Descriptor 3 of a program closes when all its processes have ended."""


class State(StrEnum):
    """The state of a guarantee on this machine."""

    HELD = "held"
    """The mechanisms are there, and the program that tried to break the guarantee failed."""
    MISSING = "missing"
    """The machine lacks a mechanism."""
    BROKEN = "broken"
    """The mechanisms are there, and the program succeeded."""
    WAIVED = "waived"
    """Not held, but waived by the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuaranteeStatus:
    """One guarantee on this machine."""

    name: str
    promise: str
    mechanism: str | None
    state: State
    reason: str | None
    """The reason why the guarantee is not held."""


def examine(*, waived: Collection[str] = (), without: Collection[str] = ()) -> list[GuaranteeStatus]:
    """The status of every guarantee. `without` is documented in `Sandbox`.

    Raises SandboxError if no program can be started at all, ConfigError for unknown names.
    """
    check_names(waived, without)
    os.environ[CANARY] = "seen"
    try:
        with Sandbox(waived=NAMES, without=without) as sandbox:
            problems = {name: _try(sandbox, probe) for name, probe in PROBES.items()}
            mechanisms = sandbox.mechanisms
    finally:
        del os.environ[CANARY]
    return [_status(name, mechanisms, problems[name], waived=name in waived) for name in NAMES]


def report(*, waived: Collection[str] = (), as_json: bool = False) -> int:
    """Prints the status of every guarantee. Returns 0 if all are held or waived, else 1. Raises what `examine` does."""
    findings = examine(waived=waived)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.state.value:8}{finding.name:18}{finding.promise}")
            if finding.mechanism is not None:
                print(f"{'':26}by: {finding.mechanism}")
            if finding.reason is not None:
                print(f"{'':26}{finding.state.value} because: {finding.reason}")
    return 0 if all(finding.state in (State.HELD, State.WAIVED) for finding in findings) else 1


def _status(name: str, mechanisms: Mechanisms, problem: str | None, *, waived: bool) -> GuaranteeStatus:
    guarantee = next(item for item in GUARANTEES if item.name == name)
    mechanism = guarantee.held_by(mechanisms)
    if mechanism is None:
        state, reason = State.MISSING, f"needs {guarantee.why_missing(mechanisms)}"
    elif problem is not None:
        state, reason = State.BROKEN, problem
    else:
        state, reason = State.HELD, None
    if waived and state is not State.HELD:
        state = State.WAIVED
    return GuaranteeStatus(name=name, promise=guarantee.promise, mechanism=mechanism, state=state, reason=reason)


def _try(sandbox: Sandbox, probe: Probe) -> str | None:
    sandbox.run(Program(source=SECRET_PROGRAM))
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory() as folder, open(reader, "rb"):
        file = Path(folder) / "file"
        file.write_text("of the host", encoding="utf-8")
        try:
            job = sandbox.start(probe.program(file=str(file), process=os.getpid(), held_open=writer))
        finally:
            os.close(writer)
        problem = probe.problem(job.wait())
        if problem is None and sorted(os.listdir(folder)) != ["file"]:
            problem = "a file was created or removed outside"
        closed, _, _ = select.select([reader], [], [], 0)
        return problem or (None if closed else "a process of the program is still running")


def main() -> int:
    """The command. Returns its exit status: 2 for an unknown guarantee, and where no program can be started."""
    parser = argparse.ArgumentParser(prog="python -m proximo_verifiers.sandbox.doctor", description=__doc__)
    parser.add_argument("--waive", action="append", default=[], help="a guarantee to run without; may be repeated")
    parser.add_argument("--json", action="store_true", help="print one JSON object per guarantee")
    given = parser.parse_args()
    try:
        return report(waived=given.waive, as_json=given.json)
    except VerifierError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
