"""The guarantees of the sandbox, and the mechanisms that hold each of them."""

from collections.abc import Collection
from dataclasses import dataclass

from proximo_verifiers.errors import SandboxError, check_choices
from proximo_verifiers.sandbox.mechanisms import MECHANISMS, Mechanisms


@dataclass(frozen=True, kw_only=True, slots=True)
class Guarantee:
    """A guarantee. It is held if the machine has all mechanisms of one of the `ways`."""

    name: str
    promise: str
    ways: tuple[tuple[frozenset[str], str], ...]
    """Pairs (needed mechanisms, how they hold the guarantee), the best first."""

    def held_by(self, mechanisms: Mechanisms) -> str | None:
        """How this machine holds the guarantee; None if it cannot."""
        there = {name for name, missing in mechanisms.as_dict().items() if missing is None}
        return next((how for needed, how in self.ways if needed <= there), None)

    def why_missing(self, mechanisms: Mechanisms) -> str:
        """The missing mechanisms, with the reasons."""
        missing = mechanisms.as_dict()
        needed = self.ways[-1][0]
        return "; ".join(f"{name}: {missing[name]}" for name in sorted(needed) if missing[name] is not None)


def _guarantee(name: str, promise: str, **ways: str) -> Guarantee:
    """The keys of `ways` are the needed mechanisms joined by `_and_`; `always` needs none."""
    taken = {key: frozenset() if key == "always" else frozenset(key.split("_and_")) for key in ways}
    return Guarantee(name=name, promise=promise, ways=tuple((taken[key], how) for key, how in ways.items()))


GUARANTEES = (
    _guarantee(
        "network",
        "no connection to anywhere, this machine included",
        namespaces_and_seccomp="no call that makes a socket (seccomp), and a network namespace without interfaces",
        seccomp="no call that makes a socket (seccomp)",
    ),
    _guarantee(
        "reading",
        "no file can be read but the interpreter's library and the program's own",
        namespaces_and_landlock="a root folder that holds nothing else (mount namespace), and landlock",
        namespaces="a root folder that holds nothing else (mount namespace)",
        landlock="landlock",
    ),
    _guarantee(
        "names",
        "not even the names, sizes and times of other files can be seen",
        namespaces="a root folder that holds nothing else (mount namespace)",
    ),
    _guarantee(
        "writing",
        "nothing can be made, changed or removed but in the program's own folder",
        namespaces_and_landlock="everything else is mounted read-only, and landlock",
        landlock_and_seccomp="landlock, and no call that changes modes, owners or times (seccomp)",
        namespaces="everything else is mounted read-only",
    ),
    _guarantee(
        "scratch",
        "the program's folder is limited in bytes and files, and gone when the program ends",
        namespaces="a file system of limited size in memory (mount namespace)",
        seccomp="RLIMIT_FSIZE for each file, and the folder is looked at every 10 ms",
    ),
    _guarantee(
        "cpu", "CPU seconds are limited", always="the fork server reads the process's CPU clock, and RLIMIT_CPU"
    ),
    _guarantee("wall", "seconds from start to end are limited", always="the fork server's clock"),
    _guarantee(
        "memory",
        "memory is limited, files in the program's folder included",
        seccomp="RLIMIT_AS on the only process, and no memory that it does not count (seccomp)",
    ),
    _guarantee("processes", "no process can be started and no file executed", seccomp="no fork, no exec (seccomp)"),
    _guarantee(
        "threads",
        "threads are limited",
        seccomp_and_thread_count="RLIMIT_NPROC under a user of the program's own",
        seccomp="no further thread (seccomp)",
        thread_count="RLIMIT_NPROC under a user of the program's own",
    ),
    _guarantee("files", "open files are limited", always="RLIMIT_NOFILE"),
    _guarantee("output", "standard output and error are limited", always="the caller reads so much and no more"),
    _guarantee(
        "environment",
        "no variable, argument or descriptor of the caller's is seen",
        always="the fork server starts with an environment of its own, and everything else is closed",
    ),
    _guarantee(
        "memory_of_others",
        "nothing of another program or of the caller is found in memory",
        always="forked from a process that never saw any of it",
    ),
    _guarantee(
        "signals",
        "no other process can be signalled, traced or looked into",
        namespaces_and_seccomp="no such call but for itself (seccomp), and a process namespace",
        seccomp="no such call but for itself (seccomp)",
    ),
    _guarantee(
        "survivors",
        "nothing outlives the program: no process, shared memory, queue or file",
        namespaces_and_seccomp="one process that is killed (seccomp), in namespaces that end with the fork server",
        seccomp="one process that is killed, without calls that make what outlives it (seccomp)",
    ),
    _guarantee(
        "privileges",
        "no capability, no gain by setuid, no new namespace, no tracing or loading into the kernel",
        seccomp="no capabilities, no_new_privs, and a list of the calls that Python needs (seccomp)",
    ),
)
NAMES = tuple(guarantee.name for guarantee in GUARANTEES)


def check_names(waived: Collection[str], without: Collection[str]) -> None:
    """Raises ConfigError for an unknown guarantee or mechanism."""
    check_choices("the sandbox has no guarantee", waived, NAMES)
    check_choices("the sandbox has no mechanism", without, MECHANISMS)


def refuse_missing(mechanisms: Mechanisms, waived: Collection[str]) -> None:
    """Raises SandboxError for guarantees that this machine cannot give and that are not waived."""
    missing = [item for item in GUARANTEES if item.held_by(mechanisms) is None and item.name not in waived]
    if missing:
        reasons = "\n".join(f"- {item.name}: {item.promise}. Needs {item.why_missing(mechanisms)}" for item in missing)
        raise SandboxError(
            f"this machine cannot confine programs as promised; missing:\n{reasons}\n"
            "`python -m proximo_verifiers.sandbox.doctor` shows all guarantees. Use a machine that has them or, if you "
            f"accept the risk, waive them by name: {', '.join(item.name for item in missing)} (docs/sandbox.md)"
        )
