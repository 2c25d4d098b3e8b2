"""System calls that Python does not wrap, and the numbers of all that the sandbox uses, for both architectures.

From arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux. None means that the
architecture lacks the call; its C library uses a newer one.
"""

import ctypes
import os
import platform
import sys

PROGRAM = {
    # Data of open files
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "lseek": (8, 62),
    # Files by name: landlock and the mount namespace restrict which
    "open": (2, None),
    "openat": (257, 56),
    "creat": (85, None),
    "close": (3, 57),
    "close_range": (436, 436),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "getdents": (78, None),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "link": (86, None),
    "linkat": (265, 37),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "copy_file_range": (326, 285),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "umask": (95, 166),
    "chmod": (90, None),
    "fchmodat": (268, 53),
    "utimensat": (280, 88),
    "listxattr": (194, 11),
    "llistxattr": (195, 12),
    # Descriptors
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    # Memory
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "msync": (26, 227),
    # Signals
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "pause": (34, None),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "restart_syscall": (219, 128),
    # Time
    "alarm": (37, None),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    # The process itself
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
    "getpriority": (140, 141),
    "getcpu": (309, 168),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getgroups": (115, 158),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getrlimit": (97, 163),
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "getrusage": (98, 165),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrandom": (318, 278),
    "prctl": (157, 167),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # Threads
    "futex": (202, 98),
    "set_tid_address": (218, 96),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "membarrier": (324, 283),
    "clone": (56, 220),
    "clone3": (435, 435),
}
"""Calls that a confined program may make: (x86-64, aarch64)."""

SET_UP = {
    "unshare": (272, 97),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "mount_setattr": (442, 442),
    "capset": (126, 91),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
"""Calls that set up the confinement: (x86-64, aarch64)."""


ARCHITECTURES = ("x86_64", "aarch64")
libc = ctypes.CDLL(None, use_errno=True)


def architecture() -> int:
    """The index of this machine's architecture in the tables of numbers. Raises OSError if it is unsupported."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ARCHITECTURES or sys.maxsize < 2**32:
        raise OSError(
            f"the sandbox needs 64-bit Linux on {' or '.join(ARCHITECTURES)}; this is {sys.platform} {machine}"
        )
    return ARCHITECTURES.index(machine)


def call(name: str, *arguments: int | bytes | ctypes.Array | ctypes.Structure | None) -> int:
    """Makes a system call. Raises OSError with the name of the call if it fails."""
    number = SET_UP[name][architecture()]
    passed = [_argument(value) for value in arguments]
    return check(name, libc.syscall(ctypes.c_long(number), *passed))


def prctl(option: int, *arguments: int) -> int:
    """Calls prctl(2). Raises OSError if it fails."""
    padded = [*arguments, 0, 0, 0, 0][:4]
    return check(f"prctl({option})", libc.prctl(option, *(ctypes.c_ulong(value) for value in padded)))


def check(name: str, result: int) -> int:
    """The result of a call of the C library. Raises OSError with the name of the call if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _argument(value: int | bytes | ctypes.Array | ctypes.Structure | None) -> object:
    if isinstance(value, int):
        return ctypes.c_long(value)
    return ctypes.byref(value) if isinstance(value, ctypes.Structure) else value
