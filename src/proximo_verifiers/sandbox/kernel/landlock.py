"""Restricts the files that a process may reach, by landlock.

Numbers and structures are from include/uapi/linux/landlock.h of Linux.
"""

import ctypes
import os
import stat
from collections.abc import Iterable
from functools import cache

from proximo_verifiers.sandbox.kernel.syscalls import call

WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
OLDEST_ABI = 3
"""The first version that covers truncate(2), of kernel 6.2."""
ALL_FILE_RIGHTS = {3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All file rights by ABI version. Later versions have those of 5."""
TCP_RIGHTS = 0b11
"""The rights bind and connect, from ABI 4."""
SCOPES = 0b11
"""Scopes for abstract sockets and for signals to processes outside, from ABI 6."""
CREATE_VERSION = 1
PATH_BENEATH = 1
READ = READ_FILE | READ_DIR
# All rights except executing, device nodes, sockets, named pipes (bits 0, 6, 9, 10, 11) and ioctl on devices (bit 15).
WRITE = ((1 << 15) - 1) & ~(1 << 0 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11)
ON_A_FILE = READ_FILE | WRITE_FILE | TRUNCATE
"""The rights that a rule for a file, not a folder, may name."""


class RulesetAttributes(ctypes.Structure):
    """struct landlock_ruleset_attr. Older kernels accept unknown fields if they are 0."""

    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class PathBeneath(ctypes.Structure):
    """Rights below an open folder: the struct landlock_path_beneath_attr of Linux."""

    _layout_ = "ms"  # of packed structures; Python 3.14 wants it said
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("parent", ctypes.c_int32))


@cache
def abi() -> int:
    """The ABI version of landlock; 0 if the kernel lacks it or it is disabled."""
    try:
        return call("landlock_create_ruleset", None, 0, CREATE_VERSION)
    except OSError:
        return 0


def rule_of(descriptor: int, rights: int) -> PathBeneath:
    """The rule that grants rights on an open path, without rights that do not apply to a plain file."""
    is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
    return PathBeneath(rights=rights if is_folder else rights & ON_A_FILE, parent=descriptor)


def restrict(rules: Iterable[PathBeneath]) -> None:
    """Restricts this process irreversibly to the paths in the rules. Needs no_new_privs."""
    version = abi()
    attributes = RulesetAttributes(files=ALL_FILE_RIGHTS[min(version, 5)])
    if version >= 4:
        attributes.network = TCP_RIGHTS
    if version >= 6:
        attributes.scoped = SCOPES
    ruleset = call("landlock_create_ruleset", attributes, ctypes.sizeof(attributes), 0)
    try:
        for rule in rules:
            call("landlock_add_rule", ruleset, PATH_BENEATH, rule, 0)
        call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)
