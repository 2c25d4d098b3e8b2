"""The entry point of the fork server: finds the mechanisms, enters namespaces, imports common modules, then serves."""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

from proximo_verifiers.sandbox.inside.child import SharedConfinement
from proximo_verifiers.sandbox.inside.delays import Delays
from proximo_verifiers.sandbox.inside.execution import hide_harness, set_home
from proximo_verifiers.sandbox.inside.fork_server import MAX_MESSAGE_BYTES, ForkServer
from proximo_verifiers.sandbox.kernel import landlock
from proximo_verifiers.sandbox.kernel.namespaces import (
    HIDDEN_FOLDERS,
    JOB_FOLDER,
    PACKAGES_FOLDER,
    bound_capabilities,
    die_with_parent,
    enter_minimal_root,
    unshare_everything,
)
from proximo_verifiers.sandbox.kernel.seccomp import build_filter
from proximo_verifiers.sandbox.mechanisms import Mechanisms, find_mechanisms

PRELOADED = (
    *("abc", "array", "bisect", "bz2", "cmath", "collections.abc", "contextlib", "copy", "ctypes", "dataclasses"),
    *("datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "lzma"),
    *("math", "operator", "re", "site", "string", "struct", "time", "traceback", "typing", "zlib"),
)
"""Modules that programs use often, and modules that need system libraries, which programs cannot read.

Each makes every fork slower, so programs import the rest themselves. `threading` and `random` are left out, because
their handlers after a fork take as long as the fork.
"""
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
"""Keeps packages from starting a thread for each core."""


def main(arguments: Sequence[str]) -> None:
    """Serves until the caller has ended. Arguments: the descriptors of this package and of the socket to the caller.

    Everything else is sent over the socket, because a program can read the arguments of its process.
    """
    _restore_signals()
    package, control = int(arguments[0]), socket.socket(fileno=int(arguments[1]))
    processes = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    control.set_inheritable(False)
    order = json.loads(control.recv(MAX_MESSAGE_BYTES))
    for name in order["forget"]:
        del os.environ[name]
    caller = os.pidfd_open(os.getppid())
    library = _library()
    mechanisms = find_mechanisms(library, workplace="/tmp", without=order["without"])
    _import_what_programs_use(order["preload"])
    os.close(package)
    packages: dict[str, str] = order["packages"]
    if packages:
        os.environ.update(ONE_THREAD)
        _load_libraries_of(order["modules"], [*library, *packages.values()], _folders_of(packages))
    owner, in_user_namespace = None, False
    if mechanisms.namespaces is None:
        boot = os.getpid()
        in_user_namespace = _enter(library, packages)
        owner = None if in_user_namespace or mechanisms.thread_count is not None else boot
    if not in_user_namespace:
        bound_capabilities()
    shared = SharedConfinement(
        mechanisms=mechanisms,
        library=_open_library(library, packages, mechanisms),
        filter=_filter(mechanisms) if mechanisms.seccomp is None else b"",
        own_users=processes if in_user_namespace else None,
    )
    control.send(json.dumps({"mechanisms": mechanisms.as_dict()}).encode())
    if mechanisms.landlock is None:
        # The result is cached for the programs.
        landlock.abi()
    if packages:
        sys.path += [PACKAGES_FOLDER] if mechanisms.namespaces is None else _folders_of(packages)
    hide_harness(order["preload"])
    if mechanisms.namespaces is None:
        set_home(JOB_FOLDER)
    folders = order["folders"] if mechanisms.namespaces is not None else ""
    del order, packages
    # Programs share all memory of this process. Freezing it keeps their garbage collector from copying pages.
    gc.collect()
    gc.freeze()
    delays = Delays(processes)
    ForkServer(control, caller, shared, owner=owner, folders=folders, delays=delays).serve()


def _filter(mechanisms: Mechanisms) -> bytes:
    """The filter. It forbids threads that cannot be counted, and changes of file modes if only landlock guards
    files."""
    return build_filter(threads=mechanisms.thread_count is None, changes=mechanisms.namespaces is None)


def _restore_signals() -> None:
    """Restores signal handlers, since a shell starts background processes with some signals ignored."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _library() -> list[str]:
    """The folders that the interpreter imports from. With -S they contain no installed packages."""
    folders = [os.path.realpath(path) for path in sys.path if os.path.isdir(path)]
    return [path for path in folders if not any(path != other and path.startswith(f"{other}/") for other in folders)]


def _folders_of(packages: Mapping[str, str]) -> list[str]:
    return sorted({os.path.dirname(path) for path in packages.values()})


def _load_libraries_of(modules: Sequence[str], known: Sequence[str], folders: Sequence[str]) -> None:
    """Loads the system libraries of packages here, because programs cannot read them.

    A child imports the packages to find out which libraries they load.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            sys.path += folders
            for name in modules:
                # An import error is reported later, by the import in the sandbox.
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
            with open("/proc/self/maps", encoding="utf-8") as maps, open(writer, "w", encoding="utf-8") as said:
                paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}
                foreign = [path for path in paths if ".so" in path and not path.startswith(tuple(known))]
                said.write("\n".join(sorted(foreign)))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as said:
        foreign = said.read().splitlines()
    os.waitpid(pid, 0)
    for path in foreign:
        ctypes.CDLL(path)


def _enter(library: Sequence[str], packages: Mapping[str, str]) -> bool:
    """Enters new namespaces. Returns in their first process, whether they include a user namespace."""
    in_user_namespace = unshare_everything()
    socket.sethostname("sandbox")
    pid = os.fork()
    if pid != 0:
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent()
    enter_minimal_root(library, workplace="/tmp", packages=packages)
    return in_user_namespace


def _open_library(
    library: Sequence[str], packages: Mapping[str, str], mechanisms: Mechanisms
) -> list[landlock.PathBeneath]:
    """Landlock rules for library and packages. Without namespaces the rules leave out other installed packages."""
    rules = [("/dev/null", landlock.READ_FILE | landlock.WRITE_FILE)]
    if packages and mechanisms.namespaces is None:
        rules.append((PACKAGES_FOLDER, landlock.READ))
    elif packages:
        rules += [(path, landlock.READ) for path in packages.values()]
        rules += [(folder, landlock.READ_DIR) for folder in _folders_of(packages)]
    for folder in library:
        if mechanisms.namespaces is None:
            rules.append((folder, landlock.READ))
            continue
        names = [name for name in os.listdir(folder) if name not in HIDDEN_FOLDERS]
        rules += [(folder, landlock.READ_DIR), *((f"{folder}/{name}", landlock.READ) for name in names)]
    return [landlock.rule_of(os.open(path, os.O_PATH | os.O_CLOEXEC), rights) for path, rights in rules]


def _import_what_programs_use(preload: Sequence[str]) -> None:
    for name in preload:
        importlib.import_module(name)
    for name in PRELOADED:
        # Some builds of Python lack some of these modules.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
