"""Resource limits of a program's process. Not the clocks that end it: fork_server.py."""

import math
import resource

from proximo.sandbox.jobs import MIB, Limits

STACK_BYTES = 64 * MIB
"""Of the first thread, for deep recursion through C; the kernel leaves at least 128 MiB of addresses below a stack."""
CPU_MARGIN_SECONDS = 2
"""The kernel's own CPU limit is a second line: it counts whole seconds, and the process's confinement with them."""


def apply_limits(limits: Limits, *, threads_counted: bool) -> None:
    """Limits that only a capability could raise again. Threads have one where they are counted for this process alone:
    elsewhere it would be a limit of all that the user runs."""
    cpu = math.ceil(limits.cpu_seconds) + CPU_MARGIN_SECONDS
    # Files live in memory where they can: what they may take is taken off what the process itself may map.
    _limit(resource.RLIMIT_AS, limits.memory_bytes - limits.scratch_bytes)
    _limit(resource.RLIMIT_CPU, cpu)
    _limit(resource.RLIMIT_FSIZE, limits.scratch_bytes)
    _limit(resource.RLIMIT_NOFILE, limits.open_files)
    _limit(resource.RLIMIT_STACK, STACK_BYTES)
    if threads_counted:
        _limit(resource.RLIMIT_NPROC, limits.threads)
    for nothing in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_NICE):
        _limit(nothing, 0)
    _limit(resource.RLIMIT_RTPRIO, 0)
    _limit(resource.RLIMIT_SIGPENDING, 64)


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (bounded, bounded))
