"""Finds the confinement mechanisms that this machine has, by trying each in a process of its own."""

import _thread
import contextlib
import os
import resource
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from proximo_verifiers.sandbox.jobs import MIB
from proximo_verifiers.sandbox.kernel import landlock, seccomp
from proximo_verifiers.sandbox.kernel.namespaces import (
    enter_job_folder,
    enter_minimal_root,
    give_up_privileges,
    unshare_everything,
)

LEFT_OUT = "left out by the caller"
FIRST_UID = 1 << 30
"""The first uid of programs that root starts. It is far above uids of accounts, and each program gets its own."""
UIDS_PER_SERVER = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Mechanisms:
    """For each mechanism the reason why it is missing, or None if it is available."""

    namespaces: str | None
    """Mount, process, network and IPC namespaces, which hide the machine from a program."""
    landlock: str | None
    """The kernel feature that restricts the files that a process may open."""
    seccomp: str | None
    """The kernel feature that restricts the system calls of a process."""
    thread_count: str | None
    """A limit on threads that counts the threads of one program only."""

    def as_dict(self) -> dict[str, str | None]:
        """A mapping from mechanism to the reason why it is missing, or None."""
        return asdict(self)


MECHANISMS = tuple(Mechanisms.__dataclass_fields__)


def find_mechanisms(library: Sequence[str], *, workplace: str, without: Collection[str]) -> Mechanisms:
    """Tries each mechanism in its own process, except those in `without`."""
    trials: dict[str, Callable[[], None]] = {
        "namespaces": partial(_try_namespaces, library, workplace, count_threads=False),
        "landlock": _try_landlock,
        "seccomp": _try_seccomp,
        "thread_count": partial(_try_namespaces, library, workplace, count_threads=True),
    }
    reasons = {name: LEFT_OUT if name in without else _what_fails(trial) for name, trial in trials.items()}
    if reasons["namespaces"] is not None:
        reasons["thread_count"] = f"needs namespaces ({reasons['namespaces']})"
    return Mechanisms(**reasons)


def program_uid(server_pid: int, slot: int) -> int:
    """The uid of a program that root starts: not used by an account or by another running program.

    `server_pid` is a process id, which Linux keeps below 2^22.
    """
    return FIRST_UID + server_pid * UIDS_PER_SERVER + slot


def _what_fails(trial: Callable[[], None]) -> str | None:
    """Runs the trial in its own process. Returns why it failed, or None."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            trial()
            os.write(writer, b"works")
        except OSError as error:
            os.write(writer, str(error).encode()[:1000])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answers:
        answer = answers.read().decode()
    os.waitpid(pid, 0)
    return None if answer == "works" else answer or "the kernel ended the process that tried it"


def _try_namespaces(library: Sequence[str], workplace: str, *, count_threads: bool) -> None:
    in_user_namespace = unshare_everything()
    # Only children enter the new process namespace, so the rest is tried in a child.
    trial = partial(_try_folders, library, workplace, in_user_namespace=in_user_namespace, count_threads=count_threads)
    failure = _what_fails(trial)
    if failure is not None:
        raise OSError(failure)


def _try_folders(library: Sequence[str], workplace: str, *, in_user_namespace: bool, count_threads: bool) -> None:
    processes = os.open("/proc", os.O_PATH)
    enter_minimal_root(library, workplace=workplace)
    enter_job_folder(os.getuid(), os.getgid(), num_bytes=MIB, processes=processes if in_user_namespace else None)
    if count_threads:
        _try_thread_count(library, as_user=None if in_user_namespace else FIRST_UID)


def _try_thread_count(library: Sequence[str], *, as_user: int | None) -> None:
    if as_user is not None:
        os.setresuid(as_user, as_user, as_user)
    for folder in library:
        os.listdir(folder)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    with contextlib.suppress(RuntimeError):
        _thread.start_new_thread(print, ())
        raise OSError("the kernel does not count the threads of the user that programs would run as")


def _try_landlock() -> None:
    version = landlock.abi()
    if version < landlock.OLDEST_ABI:
        raise OSError(
            f"the kernel offers version {version} of landlock (0: none); version {landlock.OLDEST_ABI} is needed"
        )
    give_up_privileges()
    landlock.restrict([])


def _try_seccomp() -> None:
    give_up_privileges()
    seccomp.install(seccomp.build_filter(threads=True, changes=True))
