"""Irreversibly drops the privileges of a process: capabilities, gains by exec, inspection from outside."""

import ctypes
import errno
import signal

from proximo_verifiers.sandbox.kernel.syscalls import call, prctl

SET_DEATH_SIGNAL, SET_DUMPABLE, DROP_FROM_BOUNDS, SET_SECUREBITS = 1, 4, 24, 28
NO_NEW_PRIVILEGES, AMBIENT, AMBIENT_CLEAR = 38, 47, 4
LOCKED_SECUREBITS = 0b101111
"""Locked secure bits: uid 0 has no meaning, and no capabilities are gained or kept by changing uids."""
CAPABILITY_VERSION = 0x20080522


class CapabilityHeader(ctypes.Structure):
    """Whose capabilities are meant: the struct __user_cap_header_struct of Linux."""

    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def bound_capabilities() -> None:
    """Empties the capability bounding set and removes the meaning of uid 0, if this process may do so."""
    try:
        for capability in range(64):
            prctl(DROP_FROM_BOUNDS, capability)
    except OSError as error:
        # EINVAL: past the last capability. EPERM: an ordinary user, who has no capabilities.
        if error.errno == errno.EPERM:
            return
        if error.errno != errno.EINVAL:
            raise
    prctl(SET_SECUREBITS, LOCKED_SECUREBITS)


def give_up_privileges() -> None:
    """Drops all capabilities for good, and forbids core dumps and inspection of memory."""
    prctl(AMBIENT, AMBIENT_CLEAR)
    nothing = (ctypes.c_uint32 * 6)()
    call("capset", CapabilityHeader(version=CAPABILITY_VERSION), nothing)
    prctl(NO_NEW_PRIVILEGES, 1)
    prctl(SET_DUMPABLE, 0)


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends."""
    prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
