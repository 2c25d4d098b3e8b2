"""The filter of system calls: a list of what is allowed, and EPERM for the rest. Not which files: landlock.py.

A classic BPF program (Linux' Documentation/userspace-api/seccomp_filter.rst). It cannot follow pointers, so calls are
told apart by their number and the low half of an argument; every argument that is looked at here is an int to the
kernel, which ignores the other half, but for one pointer of which both halves are looked at.
"""

import ctypes
import errno
import os
import resource
import signal
import struct

from proximo_verifiers.sandbox.kernel.syscalls import PROGRAM, architecture, prctl

LOAD_WORD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
KILL_PROCESS, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
AUDIT_ARCHITECTURES = (0xC000003E, 0xC00000B7)
X32_BIT = 0x40000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data."""
SET_SECCOMP, MODE_FILTER = 22, 2
YOUNGER_CALLS = 452
"""Calls from this number on are answered with ENOSYS: older kernels lack them, so the C library has fallbacks."""

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand: struct sock_filter."""

REFUSE: Instruction = (RETURN, 0, 0, ERRNO | errno.EPERM)
ITSELF = 0x7E57ED1D
"""Placeholder for the id of the process. It is no valid id, since Linux keeps them below 2^22."""
SIGNALS = {"kill": 1, "tgkill": 2, "tkill": 1}
"""Calls that send a signal to the process in their first argument, with the index of the signal argument."""
THREAD_FLAGS = (0x3D0F00, 0x7D0F00)
"""The flags that pthread_create of glibc and musl passes to clone: a thread of this process, no new namespace."""
DESCRIPTOR_COMMANDS = (0, 1, 2, 3, 4, 1030, 1032)
"""fcntl: duplicating, flags, size of a pipe. Not owners, leases, notices, seals or the size of a pipe set; no locks
either, nor is there flock(2): one on a file of the library is seen by every other program that has it open."""
ABOUT_A_PROCESS = {
    **{"getpgid": 0, "getsid": 0, "sched_getaffinity": 0, "sched_getparam": 0, "sched_getscheduler": 0},
    **{"getpriority": 1},
}
"""Calls that reveal something about a process, with the index of the argument that names it."""
MODES = {"chmod": 1, "fchmodat": 2}
"""Calls that change the mode of a file by name, with the index of the mode argument."""
BITS_BEYOND_PERMISSIONS = 0o7000
"""The setuid, setgid and sticky bits."""
CHANGES = frozenset({*MODES, "utimensat"})
"""Calls that only a read-only mount can restrict, not landlock."""
WITHOUT = {"clone3": errno.ENOSYS, "listxattr": errno.ENOTSUP, "llistxattr": errno.ENOTSUP}
"""Calls that libraries know to do without where they are told so. The flags of clone3 lie behind a pointer; those of
clone, which is used instead, can be read. Whoever copies a file asks for its extended attributes."""
PRIVATE_FUTEX = 0x80
SHARED_FUTEXES = (0, 9, 0x109)
"""futex: waiting, as for the end of a thread. Waking across processes, by an address in a file that several have open,
says how many wait there."""
NOT_FOLLOWED = 0x100
"""AT_SYMLINK_NOFOLLOW."""
DEVICE_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
PROCESS_OPTIONS = (3, 15, 16, 0x53564D41)
"""prctl: whether dumpable, the thread's name, the names of its mappings."""


def build_filter(*, threads: bool, changes: bool) -> bytes:
    """The filter, with or without further threads, and changes of a file's mode and times. A process may signal, and
    set limits of, none but itself: its id is put in by `install`."""
    checked: dict[str, tuple[int, tuple[int, ...]]] = {
        "fcntl": (1, DESCRIPTOR_COMMANDS),
        "ioctl": (1, DEVICE_COMMANDS),
        "prctl": (0, PROCESS_OPTIONS),
        "clone": (0, THREAD_FLAGS if threads else ()),
        "futex": (1, SHARED_FUTEXES),
        **{name: (argument, (0, ITSELF)) for name, argument in ABOUT_A_PROCESS.items()},
    }
    here = architecture()
    allowed = {name: numbers[here] for name, numbers in PROGRAM.items() if changes or name not in CHANGES}
    answers = {
        number: _check_argument(*checked[name], bit=PRIVATE_FUTEX if name == "futex" else 0)
        if name in checked
        else _answer_to(name)
        for name, number in allowed.items()
        if number is not None
    }
    program = [
        (LOAD_WORD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCHITECTURES[here]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD_WORD, 0, 0, NUMBER),
        *_search(_ranges(answers)),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _ranges(answers: dict[int, list[Instruction]]) -> list[tuple[int, list[Instruction]]]:
    """Pairs (first number, instructions from there on), sorted, with equal neighbours merged."""
    refuse = [REFUSE]
    points = {0: refuse, YOUNGER_CALLS: [(RETURN, 0, 0, ERRNO | errno.ENOSYS)], X32_BIT: [(RETURN, 0, 0, KILL_PROCESS)]}
    points |= {number + 1: refuse for number in answers if number + 1 < YOUNGER_CALLS}
    merged: list[tuple[int, list[Instruction]]] = []
    for number, answer in sorted((points | answers).items()):
        if not merged or merged[-1][1] != answer:
            merged.append((number, answer))
    return merged


def _search(ranges: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """A binary search over the call numbers. The kernel runs the filter on every number when it is installed."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    return [(JUMP_AT_LEAST, len(below), 0, ranges[middle][0]), *below, *above]


def install(program: bytes) -> None:
    """Installs the filter for this process irreversibly. Needs no_new_privs."""
    program = program.replace(struct.pack("=I", ITSELF), struct.pack("=I", os.getpid()))
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(instructions))
    pointer = ctypes.create_string_buffer(header, len(header))
    prctl(SET_SECCOMP, MODE_FILTER, ctypes.addressof(pointer))


def _answer_to(name: str) -> list[Instruction]:
    # SIGKILL that nobody outside has sent says that the machine is out of memory: no program may say so, neither by a
    # signal nor by a limit of CPU time, at which the kernel sends one. Reading that limit is setting it to nothing.
    if name in SIGNALS:
        not_killed = [(LOAD_WORD, 0, 0, ARGUMENTS + 8 * SIGNALS[name]), (JUMP_EQUAL, 0, 1, signal.SIGKILL)]
        return [*not_killed, REFUSE, *_check_argument(0, (ITSELF,))]
    if name == "setrlimit":
        return _unless((LOAD_WORD, 0, 0, ARGUMENTS), (JUMP_EQUAL, 0, 1, resource.RLIMIT_CPU))
    if name == "prlimit64":
        new = ARGUMENTS + 16
        return [
            (LOAD_WORD, 0, 0, ARGUMENTS + 8),
            (JUMP_EQUAL, 0, 5, resource.RLIMIT_CPU),
            (LOAD_WORD, 0, 0, new),
            (JUMP_EQUAL, 0, 2, 0),
            (LOAD_WORD, 0, 0, new + 4),
            (JUMP_EQUAL, 1, 0, 0),
            REFUSE,
            *_check_argument(0, (0, ITSELF)),
        ]
    if name in MODES:
        return _unless((LOAD_WORD, 0, 0, ARGUMENTS + 8 * MODES[name]), (JUMP_ANY_BIT, 0, 1, BITS_BEYOND_PERMISSIONS))
    if name == "utimensat":
        # Without a name it is about an open file, which may be one of the caller's.
        named = [(LOAD_WORD, 0, 0, ARGUMENTS + 8), (JUMP_EQUAL, 0, 3, 0), (LOAD_WORD, 0, 0, ARGUMENTS + 12)]
        return [*named, (JUMP_EQUAL, 0, 1, 0), REFUSE, *_check_argument(3, (0, NOT_FOLLOWED))]
    return [(RETURN, 0, 0, ERRNO | WITHOUT[name] if name in WITHOUT else ALLOW)]


def _unless(load: Instruction, test: Instruction) -> list[Instruction]:
    """Instructions that refuse the call if the test holds. The test must skip one instruction if it does not."""
    return [load, test, REFUSE, (RETURN, 0, 0, ALLOW)]


def _check_argument(index: int, values: tuple[int, ...], *, bit: int = 0) -> list[Instruction]:
    """Instructions that allow the call if the argument is one of the values, or has the bit."""
    comparisons = [(JUMP_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [
        (LOAD_WORD, 0, 0, ARGUMENTS + 8 * index),
        (JUMP_ANY_BIT, len(values) + 1, 0, bit),
        *comparisons,
        REFUSE,
        (RETURN, 0, 0, ALLOW),
    ]
