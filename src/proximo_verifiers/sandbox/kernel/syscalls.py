"""System calls that Python does not wrap, by number."""

import ctypes
import os
import platform
import sys

from proximo_verifiers.sandbox.kernel.syscall_numbers import SET_UP

ARCHITECTURES = ("x86_64", "aarch64")
libc = ctypes.CDLL(None, use_errno=True)


def architecture() -> int:
    """The index of this machine's architecture in the tables of numbers. Raises OSError if it is unsupported."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ARCHITECTURES or sys.maxsize < 2**32:
        raise OSError(
            f"the sandbox needs 64-bit Linux on {' or '.join(ARCHITECTURES)}; this is {sys.platform} {machine}"
        )
    return ARCHITECTURES.index(machine)


def call(name: str, *arguments: int | bytes | ctypes.Array | ctypes.Structure | None) -> int:
    """Makes a system call. Raises OSError with the name of the call if it fails."""
    number = SET_UP[name][architecture()]
    passed = [_argument(value) for value in arguments]
    return check(name, libc.syscall(ctypes.c_long(number), *passed))


def prctl(option: int, *arguments: int) -> int:
    """Calls prctl(2). Raises OSError if it fails."""
    padded = [*arguments, 0, 0, 0, 0][:4]
    return check(f"prctl({option})", libc.prctl(option, *(ctypes.c_ulong(value) for value in padded)))


def check(name: str, result: int) -> int:
    """The result of a call of the C library. Raises OSError with the name of the call if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _argument(value: int | bytes | ctypes.Array | ctypes.Structure | None) -> object:
    if isinstance(value, int):
        return ctypes.c_long(value)
    return ctypes.byref(value) if isinstance(value, ctypes.Structure) else value
