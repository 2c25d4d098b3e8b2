"""The filter of system calls: a list of what is allowed, and EPERM for the rest. Not which files: landlock.py.

A classic BPF program (Linux' Documentation/userspace-api/seccomp_filter.rst). It cannot follow pointers, so calls are
told apart by their number and the low half of an argument; every argument that is looked at here is an int to the
kernel, which ignores the other half.
"""

import ctypes
import errno
import struct

from proximo.sandbox.syscall_numbers import PROGRAM
from proximo.sandbox.syscalls import architecture, prctl

LOAD_WORD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
KILL_PROCESS, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
AUDIT_ARCHITECTURES = (0xC000003E, 0xC00000B7)
X32_BIT = 0x40000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data."""
SET_SECCOMP, MODE_FILTER = 22, 2
YOUNGER_CALLS = 452
"""Calls from here on are unknown to older kernels too, so the C library has a way to do without them."""

THREAD_FLAGS = (0x3D0F00, 0x7D0F00)
"""What pthread_create of glibc and musl passes to clone: a thread of this process, in no new namespace."""
DESCRIPTOR_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
"""fcntl: duplicating, flags, locks, size of a pipe. Not owners, leases, notices, seals or the size of a pipe set."""
DEVICE_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
PROCESS_OPTIONS = (3, 15, 16, 0x53564D41)
"""prctl: whether dumpable, the thread's name, the names of its mappings."""


def build_filter(pid: int, *, threads: bool) -> bytes:
    """The filter for the process `pid`: the only one it may signal or set limits of; with or without threads."""
    checked: dict[str, tuple[int, tuple[int, ...]]] = {
        "kill": (0, (pid,)),
        "tgkill": (0, (pid,)),
        "tkill": (0, (pid,)),
        "prlimit64": (0, (0, pid)),
        "fcntl": (1, DESCRIPTOR_COMMANDS),
        "ioctl": (1, DEVICE_COMMANDS),
        "prctl": (0, PROCESS_OPTIONS),
        "clone": (0, THREAD_FLAGS if threads else ()),
    }
    here = architecture()
    program = [
        (LOAD_WORD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCHITECTURES[here]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD_WORD, 0, 0, NUMBER),
        (JUMP_AT_LEAST, 0, 1, X32_BIT),
        (RETURN, 0, 0, KILL_PROCESS),
    ]
    for name, numbers in PROGRAM.items():
        number = numbers[here]
        if number is not None:
            answer = _check_argument(*checked[name]) if name in checked else [_answer_to(name)]
            program += [(JUMP_EQUAL, 0, len(answer), number), *answer]
    program += [
        (JUMP_AT_LEAST, 0, 1, YOUNGER_CALLS),
        (RETURN, 0, 0, ERRNO | errno.ENOSYS),
        (RETURN, 0, 0, ERRNO | errno.EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def install(program: bytes) -> None:
    """Put this process under the filter for good. Needs no_new_privs."""
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(instructions))
    pointer = ctypes.create_string_buffer(header, len(header))
    prctl(SET_SECCOMP, MODE_FILTER, ctypes.addressof(pointer))


def _answer_to(name: str) -> tuple[int, int, int, int]:
    # Its flags lie behind a pointer. "No such call" makes the C library use clone, whose flags can be read.
    return (RETURN, 0, 0, ERRNO | errno.ENOSYS if name == "clone3" else ALLOW)


def _check_argument(index: int, values: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    comparisons = [(JUMP_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [
        (LOAD_WORD, 0, 0, ARGUMENTS + 8 * index),
        *comparisons,
        (RETURN, 0, 0, ERRNO | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
