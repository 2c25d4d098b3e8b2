"""What the forked child does before it runs a program: confine itself, step by step. Not the program: execution.py."""

import fcntl
import math
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proximo.sandbox.jobs import MIB, Limits
from proximo.sandbox.kernel import landlock, seccomp
from proximo.sandbox.kernel.namespaces import enter_job_folder
from proximo.sandbox.kernel.privileges import bound_capabilities, die_with_parent, give_up_privileges
from proximo.sandbox.mechanisms import Mechanisms
from proximo.sandbox.payload import SIZE_BYTES

HIGH = 256
"""Where descriptors wait until they get their numbers; programs' own are below."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedConfinement:
    """What all programs of a fork server have in common."""

    mechanisms: Mechanisms
    library: Sequence[landlock.PathBeneath]
    """Landlock's rules for the interpreter's library."""
    filter: bytes
    """Of system calls."""
    own_users: int | None
    """The open /proc of the machine where each program gets a user namespace of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """One program, as the child gets it."""

    payload: int
    """Descriptor of source and files."""
    descriptors: Mapping[int, int]
    """Number in the program -> descriptor here; 0, 1 and 2 among them."""
    limits: Limits
    folder: str
    """Its folder, which exists already where there are no namespaces."""
    uid: int | None
    """To run as, where it is not the fork server's own."""


def confine(assignment: Assignment, shared: SharedConfinement, *, parent: int, status: int) -> str:
    """Confines this process for good and returns the program's text. `status` alone stays open besides its own.

    Raises OSError where a step is refused. The order matters: each step takes away what an earlier one needed.
    """
    mechanisms = shared.mechanisms
    os.setsid()
    source, files = _read_payload(assignment.payload)
    _place_descriptors(assignment.descriptors)
    _enter_folder(assignment, shared)
    for name, contents in files.items():
        with open(name, "wb", opener=_make_new) as file:
            file.write(contents)
    give_up_privileges()
    # Changing the uid has undone it.
    die_with_parent()
    if os.getppid() != parent:
        raise OSError("the fork server is gone")
    if mechanisms.landlock is None:
        own = os.open(".", os.O_PATH)
        landlock.restrict([*shared.library, landlock.rule_of(own, landlock.WRITE)])
    apply_limits(assignment.limits, threads_counted=mechanisms.thread_count is None)
    _close_all_but({*assignment.descriptors, status})
    if mechanisms.seccomp is None:
        seccomp.install(shared.filter)
    return source


def _read_payload(descriptor: int) -> tuple[str, dict[str, bytes]]:
    whole = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    parts, at = [], 0
    while at < len(whole):
        start = at + SIZE_BYTES
        at = start + int.from_bytes(whole[at:start], "little")
        parts.append(whole[start:at])
    source, *files = parts
    return source.decode(errors="surrogatepass"), dict(zip(map(os.fsdecode, files[::2]), files[1::2], strict=True))


def _place_descriptors(wanted: Mapping[int, int]) -> None:
    """Moves them all out of the way first, for a number may be taken by another that has still to move."""
    moved = {number: move_up(here) for number, here in wanted.items()}
    for number, here in moved.items():
        os.dup2(here, number)


def move_up(descriptor: int) -> int:
    """The descriptor under another number that no program asks for."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH)


def _enter_folder(assignment: Assignment, shared: SharedConfinement) -> None:
    uid = os.getuid() if assignment.uid is None else assignment.uid
    gid = os.getgid() if assignment.uid is None else assignment.uid
    if shared.mechanisms.namespaces is None:
        scratch = assignment.limits.scratch_bytes
        enter_job_folder(uid, gid, num_bytes=scratch, processes=shared.own_users)
    if shared.own_users is not None:
        # The new user namespace has given back what the fork server had given up.
        bound_capabilities()
    if assignment.uid is not None:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    os.umask(0o077)
    os.chdir(assignment.folder)


def _make_new(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, 0o600)


def _close_all_but(kept: set[int]) -> None:
    first = 0
    for number in sorted(kept):
        # An empty range would be read as one without an end.
        if first < number:
            os.closerange(first, number)
        first = number + 1
    os.closerange(first, 2**31 - 1)


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
