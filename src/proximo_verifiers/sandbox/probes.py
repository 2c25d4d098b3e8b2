"""For each guarantee a program that tries to break it. These are quick checks; the tests have many more."""

from dataclasses import dataclass, replace

from proximo_verifiers.sandbox.jobs import MIB, Ending, Limits, Outcome, Program

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
