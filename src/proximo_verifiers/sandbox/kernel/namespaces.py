"""Confinement by the kernel: namespaces without network and other processes, and privileges that are dropped for good.

The root folder holds only the library. The fork server enters the namespaces once. Each program then gets its own mount
namespace with its own folder and, under an ordinary user, its own user namespace, in which its threads are counted. A
program has no capabilities, gains nothing by exec and cannot be inspected from outside.
"""

import ctypes
import errno
import os
import signal
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from proximo_verifiers.sandbox.jobs import MIB
from proximo_verifiers.sandbox.kernel.syscalls import call, prctl

NEW_MOUNTS, NEW_CGROUP, NEW_HOST_NAME, NEW_IPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEW_USERS, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
EVERYTHING = NEW_MOUNTS | NEW_CGROUP | NEW_HOST_NAME | NEW_IPC | NEW_PROCESSES | NEW_NETWORK
READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXECUTION = 1, 2, 4, 8
BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18
DETACH = 2
AT_FOLDER, AT_RECURSIVE = -100, 0x8000

JOB_FOLDER = "/job"
PACKAGES_FOLDER = "/packages"
NO_PACKAGES: Mapping[str, str] = MappingProxyType({})
MAX_FILES = 2048
"""Largest number of files and folders in the folder of a program."""
HIDDEN_FOLDERS = ("site-packages", "dist-packages")
"""Folders of installed packages inside the library, which are hidden."""
SET_DEATH_SIGNAL, SET_DUMPABLE, DROP_FROM_BOUNDS, SET_SECUREBITS = 1, 4, 24, 28
NO_NEW_PRIVILEGES, AMBIENT, AMBIENT_CLEAR = 38, 47, 4
LOCKED_SECUREBITS = 0b101111
"""Locked secure bits: uid 0 has no meaning, and no capabilities are gained or kept by changing uids."""
CAPABILITY_VERSION = 0x20080522


def unshare_everything() -> bool:
    """Puts the children of this process into new namespaces. Returns True if this needed a user namespace.

    Raises OSError if the kernel or its settings forbid it.
    """
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        try:
            call("unshare", EVERYTHING)
        except PermissionError:
            pass
        else:
            return False
    call("unshare", EVERYTHING | NEW_USERS)
    processes = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    try:
        map_user(uid, gid, processes)
    finally:
        os.close(processes)
    return True


def map_user(uid: int, gid: int, processes: int) -> None:
    """Maps the ids of this process to themselves in its new user namespace, which has no other ids.

    `processes` is the open /proc of the machine, since the minimal root has none.
    """
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        descriptor = os.open(f"self/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=processes)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def enter_minimal_root(library: Iterable[str], *, workplace: str, packages: Mapping[str, str] = NO_PACKAGES) -> None:
    """Changes the root to one with the folders of `library` and /dev/null only, all read-only under their own names.

    `packages` maps names to paths that are mounted read-only in PACKAGES_FOLDER. The root is assembled over
    `workplace`, any existing folder, in this mount namespace alone, so that nobody else sees it.
    """
    targets = {path: path for path in (*library, "/dev/null")}
    targets |= {f"{PACKAGES_FOLDER}/{name}": path for name, path in packages.items()}
    sources = {target: os.open(path, os.O_PATH | os.O_CLOEXEC) for target, path in targets.items()}
    _mount(None, "/", flags=RECURSIVE | PRIVATE)
    _mount("tmpfs", workplace, flags=NO_SETUID | NO_DEVICES, options=f"size={MIB},nr_inodes=1024,mode=755")
    for path, descriptor in sources.items():
        target = f"{workplace}{path}"
        _make_mount_point(target, like=descriptor)
        _mount(f"/proc/self/fd/{descriptor}", target, flags=BIND | RECURSIVE, kind=None)
        os.close(descriptor)
        _set_read_only(target, devices=path == "/dev/null")
    for path in library:
        for name in HIDDEN_FOLDERS:
            if os.path.isdir(f"{workplace}{path}/{name}"):
                _mount("tmpfs", f"{workplace}{path}/{name}", flags=READ_ONLY, options="size=4k,nr_inodes=1,mode=555")
    os.mkdir(f"{workplace}{JOB_FOLDER}", 0o700)
    os.chdir(workplace)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    os.chdir("/")
    _set_read_only("/", devices=False, recursive=False)


def enter_job_folder(uid: int, gid: int, *, num_bytes: int, processes: int | None) -> None:
    """Enters a mount namespace with an empty folder in memory, of limited size, that ends with this process.

    With `processes`, the open /proc of the machine, it enters a user namespace as well, in which threads are counted.
    """
    call("unshare", NEW_MOUNTS if processes is None else NEW_MOUNTS | NEW_USERS)
    if processes is not None:
        map_user(uid, gid, processes)
    options = f"size={num_bytes},nr_inodes={MAX_FILES},mode=700,uid={uid},gid={gid}"
    _mount("tmpfs", JOB_FOLDER, flags=NO_SETUID | NO_DEVICES | NO_EXECUTION, options=options)


def _make_mount_point(target: str, *, like: int) -> None:
    if os.path.isdir(f"/proc/self/fd/{like}"):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))


def _mount(source: str | None, target: str, *, flags: int, kind: str | None = "tmpfs", options: str = "") -> None:
    texts = (None if text is None else text.encode() for text in (source, target, kind))
    encoded_source, encoded_target, encoded_kind = texts
    call("mount", encoded_source, encoded_target, encoded_kind, flags, options.encode() or None)


def _set_read_only(path: str, *, devices: bool, recursive: bool = True) -> None:
    attributes = READ_ONLY | NO_SETUID | (0 if devices else NO_DEVICES)
    # struct mount_attr: set, clear, propagation, user namespace. It only adds attributes, so locked ones stay.
    structure = attributes.to_bytes(8, "little") + bytes(24)
    call("mount_setattr", AT_FOLDER, path.encode(), AT_RECURSIVE if recursive else 0, structure, len(structure))


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
