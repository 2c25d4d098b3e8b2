"""Starts a zygote: finds out what the machine can do, enters the namespaces, imports what programs use. Not serving."""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence

from proximo.sandbox import landlock
from proximo.sandbox.child import Surroundings
from proximo.sandbox.execution import make_at_home, make_ordinary
from proximo.sandbox.layers import Layers, find_layers
from proximo.sandbox.namespaces import HIDDEN_FOLDERS, JOB_FOLDER, enter_minimal_root, unshare_everything
from proximo.sandbox.privileges import bound_capabilities, die_with_parent
from proximo.sandbox.seccomp import build_filter
from proximo.sandbox.zygote import Zygote

PRELOADED = (
    *("abc", "array", "bisect", "bz2", "cmath", "collections.abc", "contextlib", "copy", "ctypes", "dataclasses"),
    *("datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "lzma"),
    *("math", "operator", "re", "site", "string", "struct", "time", "traceback", "typing", "zlib"),
)
"""What programs use much, and what needs libraries of the system, which they cannot read. Each makes every fork dearer;
the rest of the library is imported by the programs that want it. `threading` and `random` are not here: what they have
Python do after each fork costs as much as the fork."""


def main(arguments: Sequence[str]) -> None:
    """Serve until the caller is gone. Arguments: descriptor of the socket, layers to do without, folder of scratch."""
    _heed_signals()
    order = json.loads(arguments[0])
    for name in order["forget"]:
        del os.environ[name]
    control = socket.socket(fileno=order["control"])
    control.set_inheritable(False)
    caller = os.pidfd_open(os.getppid())
    library = _library()
    layers = find_layers(library, workplace="/tmp", without=order["without"])
    _import_what_programs_use(order["preload"])
    owner, own_users = None, None
    if layers.namespaces is None:
        boot = os.getpid()
        own_users = _enter(library)
        owner = boot if own_users is None and layers.thread_count is None else None
    if own_users is None:
        bound_capabilities()
    surroundings = Surroundings(
        layers=layers,
        library=_open_library(library, layers),
        # Better no further threads than threads that nobody counts.
        filter=build_filter(threads=layers.thread_count is None) if layers.seccomp is None else b"",
        own_users=own_users,
    )
    control.send(json.dumps({"layers": layers.as_dict(), "python": sys.version.split()[0]}).encode())
    if layers.landlock is None:
        # Asked once: it is remembered.
        landlock.abi()
    make_ordinary(order["preload"])
    if layers.namespaces is None:
        make_at_home(JOB_FOLDER)
    # All there is now is shared with the programs: collecting theirs must not write to it.
    gc.collect()
    gc.freeze()
    Zygote(control, caller, surroundings, owner=owner, folders=order["folders"]).serve()


def _heed_signals() -> None:
    """What a shell runs in the background ignores some signals, and children would too: no program may depend on it."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _library() -> list[str]:
    """The folders that the interpreter imports from: with -S, nobody's packages are among them."""
    folders = [os.path.realpath(path) for path in sys.path if os.path.isdir(path)]
    return [path for path in folders if not any(path != other and path.startswith(f"{other}/") for other in folders)]


def _enter(library: Sequence[str]) -> int | None:
    """Returns in the first process of the new namespaces; the one that called waits for it to end."""
    in_user_namespace = unshare_everything()
    pid = os.fork()
    if pid != 0:
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent()
    processes = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    enter_minimal_root(library, workplace="/tmp")
    if in_user_namespace:
        return processes
    os.close(processes)
    return None


def _open_library(library: Sequence[str], layers: Layers) -> list[landlock.PathBeneath]:
    """Landlock's rules for the library. Where what others installed is not hidden, everything beside it."""
    rules = [("/dev/null", landlock.READ_FILE | landlock.WRITE_FILE)]
    for folder in library:
        if layers.namespaces is None:
            rules.append((folder, landlock.READ))
            continue
        names = [name for name in os.listdir(folder) if name not in HIDDEN_FOLDERS]
        rules += [(folder, landlock.READ_DIR), *((f"{folder}/{name}", landlock.READ) for name in names)]
    return [landlock.rule_of(os.open(path, os.O_PATH | os.O_CLOEXEC), rights) for path, rights in rules]


def _import_what_programs_use(preload: Sequence[str]) -> None:
    for name in preload:
        importlib.import_module(name)
    for name in PRELOADED:
        # Some builds of Python have been made without one or the other.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
