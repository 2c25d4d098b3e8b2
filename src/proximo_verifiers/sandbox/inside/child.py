"""The confinement of a forked child before it runs a program."""

import fcntl
import math
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proximo_verifiers.sandbox.jobs import MIB, Limits
from proximo_verifiers.sandbox.kernel import landlock, seccomp
from proximo_verifiers.sandbox.kernel.namespaces import (
    bound_capabilities,
    die_with_parent,
    enter_job_folder,
    give_up_privileges,
)
from proximo_verifiers.sandbox.mechanisms import Mechanisms
from proximo_verifiers.sandbox.payload import SIZE_BYTES

HIGH = 256
"""The first descriptor number that programs do not use; descriptors are moved here temporarily."""
STACK_BYTES = 64 * MIB
"""Stack of the first thread, for deep recursion through C. The kernel reserves at least 128 MiB for a stack."""
CPU_MARGIN_SECONDS = 2
"""Margin of the kernel's CPU limit, a second line of defence that counts whole seconds and includes confinement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedConfinement:
    """The parts of the confinement that all programs of a fork server share."""

    mechanisms: Mechanisms
    library: Sequence[landlock.PathBeneath]
    """Landlock rules for the library of the interpreter."""
    filter: bytes
    """The seccomp filter of system calls."""
    own_users: int | None
    """The open /proc of the machine if each program gets its own user namespace, else None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The program of one child, with its limits."""

    payload: int
    """Descriptor of the source and files of the program."""
    descriptors: Mapping[int, int]
    """Maps descriptor numbers in the program, including 0, 1 and 2, to descriptors of this process."""
    limits: Limits
    folder: str
    """The folder of the program. Without namespaces it exists already."""
    uid: int | None
    """The uid of the program, or None for that of the fork server."""


def confine(assignment: Assignment, shared: SharedConfinement, *, parent: int, status: int) -> str:
    """Confines this process irreversibly and returns the source of the program.

    Of the descriptors that are not the program's, only `status` stays open. Raises OSError if a step fails. The order
    matters: each step removes rights that an earlier one needed.
    """
    mechanisms = shared.mechanisms
    os.setsid()
    source, files = _read_payload(assignment.payload)
    _enter_folder(assignment, shared)
    for name, contents in files.items():
        with open(name, "wb", opener=_make_new) as file:
            file.write(contents)
    give_up_privileges()
    # A change of the uid clears the setting of the fork server.
    die_with_parent()
    if os.getppid() != parent:
        raise OSError("the fork server has ended")
    if mechanisms.landlock is None:
        own = os.open(".", os.O_PATH)
        landlock.restrict([*shared.library, landlock.rule_of(own, landlock.WRITE)])
    # Takes numbers of descriptors that the steps before needed; under the limits there would be no room.
    _place_descriptors(assignment.descriptors)
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
    """Gives descriptors their numbers. Moves all out of the way first, since a number may still be in use."""
    moved = {number: move_up(here) for number, here in wanted.items()}
    for number, here in moved.items():
        os.dup2(here, number)


def move_up(descriptor: int) -> int:
    """A duplicate of the descriptor with a number that no program uses."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH)


def _enter_folder(assignment: Assignment, shared: SharedConfinement) -> None:
    uid = os.getuid() if assignment.uid is None else assignment.uid
    gid = os.getgid() if assignment.uid is None else assignment.uid
    if shared.mechanisms.namespaces is None:
        scratch = assignment.limits.scratch_bytes
        enter_job_folder(uid, gid, num_bytes=scratch, processes=shared.own_users)
    if shared.own_users is not None:
        # The new user namespace restored the capabilities that the fork server had dropped.
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
        # closerange would treat an empty range as unbounded.
        if first < number:
            os.closerange(first, number)
        first = number + 1
    os.closerange(first, 2**31 - 1)


def apply_limits(limits: Limits, *, threads_counted: bool) -> None:
    """Sets resource limits, which only a capability could raise again.

    The limit of threads is set only if threads are counted per program; otherwise it would count all of the user's.
    """
    cpu = math.ceil(limits.cpu_seconds) + CPU_MARGIN_SECONDS
    # The scratch folder is in memory, so its size is subtracted from what the process may map.
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
