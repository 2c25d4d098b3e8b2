"""What a process gives up for good: capabilities, gains by exec, being looked into. Not its limits: limits.py."""

import ctypes
import errno
import signal

from proximo.sandbox.kernel.syscalls import call, prctl

SET_DEATH_SIGNAL, SET_DUMPABLE, DROP_FROM_BOUNDS, SET_SECUREBITS = 1, 4, 24, 28
NO_NEW_PRIVILEGES, AMBIENT, AMBIENT_CLEAR = 38, 47, 4
LOCKED_SECUREBITS = 0b101111
"""Uid 0 means nothing, changing it gives nothing, capabilities are not kept; none of it can be undone."""
CAPABILITY_VERSION = 0x20080522


class CapabilityHeader(ctypes.Structure):
    """struct __user_cap_header_struct."""

    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def bound_capabilities() -> None:
    """Take every capability out of the bounding set, and uid 0 its meaning, where this process is allowed to."""
    try:
        for capability in range(64):
            prctl(DROP_FROM_BOUNDS, capability)
    except OSError as error:
        # EINVAL: one beyond the last. EPERM: an ordinary user, who has none to lose.
        if error.errno == errno.EPERM:
            return
        if error.errno != errno.EINVAL:
            raise
    prctl(SET_SECUREBITS, LOCKED_SECUREBITS)


def give_up_privileges() -> None:
    """No capability left, none to be had; no core dump, and no look into its memory from outside."""
    prctl(AMBIENT, AMBIENT_CLEAR)
    nothing = (ctypes.c_uint32 * 6)()
    call("capset", CapabilityHeader(version=CAPABILITY_VERSION), nothing)
    prctl(NO_NEW_PRIVILEGES, 1)
    prctl(SET_DUMPABLE, 0)


def die_with_parent() -> None:
    """SIGKILL for this process when the thread that started it ends."""
    prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
