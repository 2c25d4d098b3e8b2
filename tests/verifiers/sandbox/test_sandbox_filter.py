"""The filter of system calls, run by hand: what it answers to every number, on both architectures."""

import errno
import platform
import struct

import pytest

from proximo_verifiers.sandbox.kernel import seccomp
from proximo_verifiers.sandbox.kernel.seccomp import (
    ALLOW,
    AUDIT_ARCHITECTURES,
    ERRNO,
    ITSELF,
    KILL_PROCESS,
    THREAD_FLAGS,
    build_filter,
)
from proximo_verifiers.sandbox.kernel.syscalls import PROGRAM, SET_UP

REFUSED, UNKNOWN = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS
CHECKED = {
    "kill",
    "tgkill",
    "tkill",
    "setrlimit",
    "prlimit64",
    "fcntl",
    "ioctl",
    "prctl",
    "clone",
    "utimensat",
    "futex",
}
CHECKED |= {*seccomp.ABOUT_A_PROCESS, *seccomp.MODES, *seccomp.WITHOUT}
FORBIDDEN = {
    # From arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h, by hand: (x86-64, aarch64).
    **{"socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "sendmsg": (46, 211), "socketpair": (53, 199)},
    **{"execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117), "process_vm_readv": (310, 270)},
    **{"mount": (165, 40), "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "io_uring_setup": (425, 425)},
    **{"perf_event_open": (298, 241), "keyctl": (250, 219), "memfd_create": (319, 279), "shmget": (29, 194)},
    **{"mq_open": (240, 180), "semget": (64, 190), "msgget": (68, 186), "pidfd_open": (434, 434)},
    **{"fchmod": (91, 52), "fchown": (93, 55), "setxattr": (188, 5), "flock": (73, 32)},
    **{"setuid": (105, 146), "setsid": (112, 157), "personality": (135, 92), "mknodat": (259, 33), "chroot": (161, 51)},
    **{"userfaultfd": (323, 282), "splice": (275, 76), "vmsplice": (278, 75), "inotify_init1": (294, 26)},
}


@pytest.fixture(params=[0, 1], ids=["x86_64", "aarch64"])
def here(request, monkeypatch) -> int:
    """The architecture that the filter is built for."""
    monkeypatch.setattr(platform, "machine", lambda: ("x86_64", "aarch64")[request.param])
    return request.param


def answer(program: bytes, number: int, *arguments: int, architecture: int) -> int:
    """What the kernel's machine would return."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    seen = struct.pack("=IIQ6Q", number, architecture, 0, *padded)
    accumulator, at = 0, 0
    for _ in range(len(program) // 8):
        code, if_true, if_false, operand = struct.unpack_from("=HBBI", program, 8 * at)
        if code == seccomp.RETURN:
            return operand
        if code == seccomp.LOAD_WORD:
            accumulator = struct.unpack_from("=I", seen, operand)[0]
            at += 1
        else:
            holds = {
                seccomp.JUMP_EQUAL: accumulator == operand,
                seccomp.JUMP_AT_LEAST: accumulator >= operand,
                seccomp.JUMP_ANY_BIT: bool(accumulator & operand),
            }[code]
            at += 1 + (if_true if holds else if_false)
    raise AssertionError("the filter runs in circles")


def test_every_number_is_answered_as_the_table_says(here):
    program = build_filter(threads=True, changes=True)
    names = {numbers[here]: name for name, numbers in PROGRAM.items() if numbers[here] is not None}
    for number in range(seccomp.YOUNGER_CALLS):
        said = answer(program, number, architecture=AUDIT_ARCHITECTURES[here])
        name = names.get(number)
        if name not in CHECKED:
            assert said == (REFUSED if name is None else ALLOW), (number, name)
    for number in (seccomp.YOUNGER_CALLS, 1000, 0x3FFFFFFF):
        assert answer(program, number, architecture=AUDIT_ARCHITECTURES[here]) == UNKNOWN


def test_the_limit_of_cpu_time_can_be_read_and_not_set(here):
    program = build_filter(threads=True, changes=True)
    cpu, files, pointer = 0, 7, 0x7FFF00000000

    def said(name: str, *arguments: int) -> int:
        return answer(program, PROGRAM[name][here], *arguments, architecture=AUDIT_ARCHITECTURES[here])

    assert said("setrlimit", cpu, pointer) == REFUSED
    assert said("setrlimit", files, pointer) == ALLOW
    for process in (0, ITSELF):
        assert [said("prlimit64", process, cpu, new) for new in (0, 16, pointer)] == [ALLOW, REFUSED, REFUSED]
        assert said("prlimit64", process, files, pointer) == ALLOW
    assert {said("prlimit64", 1, which, 0) for which in (cpu, files)} == {REFUSED}


def test_no_other_architecture_and_no_x32_lives(here):
    program = build_filter(threads=True, changes=True)
    for other in {0x40000003, 0x40000028, 0, *AUDIT_ARCHITECTURES} - {AUDIT_ARCHITECTURES[here]}:
        assert answer(program, 39, architecture=other) == KILL_PROCESS
    for number in (0x40000000, 0x40000027, 0xFFFFFFFF):
        assert answer(program, number, architecture=AUDIT_ARCHITECTURES[here]) == KILL_PROCESS


def test_what_a_program_must_not_do_is_on_no_list(here):
    program = build_filter(threads=True, changes=True)
    for name, numbers in FORBIDDEN.items():
        assert name not in PROGRAM
        assert answer(program, numbers[here], architecture=AUDIT_ARCHITECTURES[here]) == REFUSED, name
    assert not SET_UP.keys() & PROGRAM.keys()


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("kill", [(ITSELF, 15)], [(1, 15), (0, 15), (2**32 - 1, 15), (ITSELF + 1, 15), (ITSELF, 9)]),
        ("tgkill", [(ITSELF, ITSELF, 6)], [(1, ITSELF, 6), (ITSELF, ITSELF, 9)]),
        ("prlimit64", [(0, 7), (ITSELF, 7)], [(1, 7)]),
        ("fcntl", [(1, 0), (1, 3), (1, 1030)], [(1, each) for each in (5, 6, 7, 8, 10, 36, 37, 38, 1024, 1031, 1033)]),
        ("fchmodat", [(3, 4096, 0o777), (3, 4096, 0)], [(3, 4096, each) for each in (0o1000, 0o2000, 0o4755, 0o7777)]),
        ("utimensat", [(3, 4096, 0, 0), (3, 2**32, 0, 0x100)], [(3, 0, 0, 0), (3, 4096, 0, 0x1000)]),
        ("futex", [(8, 0x81), (8, 0), (8, 0x109)], [(8, each) for each in (1, 3, 4, 5, 10, 0x101, 0x10A)]),
        ("sched_getscheduler", [(0,), (ITSELF,)], [(1,), (ITSELF - 1,)]),
        ("getpriority", [(0, 0), (0, ITSELF)], [(0, 1), (2, 1000)]),
        ("ioctl", [(1, 0x5401), (1, 0x541B)], [(1, 0x5412), (1, 0x540E), (1, 0x89A2)]),
        ("prctl", [(15, 0), (16, 0)], [(1, 0), (4, 1), (22, 2), (38, 1), (0x59616D61, 1)]),
        ("clone", [(flags,) for flags in THREAD_FLAGS], [(17,), (0x4111,), (0x10000000 | THREAD_FLAGS[0],), (0x100,)]),
    ],
)
def test_calls_are_told_apart_by_an_argument(here, name, allowed, refused):
    program = build_filter(threads=True, changes=True)
    number, architecture = PROGRAM[name][here], AUDIT_ARCHITECTURES[here]
    assert {answer(program, number, *given, architecture=architecture) for given in allowed} == {ALLOW}
    assert {answer(program, number, *given, architecture=architecture) for given in refused} == {REFUSED}


def test_modes_and_times_are_left_alone_where_landlock_alone_guards_files(here):
    program = build_filter(threads=True, changes=False)
    numbers = [PROGRAM[name][here] for name in seccomp.CHANGES if PROGRAM[name][here] is not None]
    given = (3, 4096, 0, 0)
    assert {answer(program, each, *given, architecture=AUDIT_ARCHITECTURES[here]) for each in numbers} == {REFUSED}


def test_threads_can_be_forbidden_and_clone3_is_never_there(here):
    program = build_filter(threads=False, changes=True)
    clone, architecture = PROGRAM["clone"][here], AUDIT_ARCHITECTURES[here]
    assert {answer(program, clone, flags, architecture=architecture) for flags in THREAD_FLAGS} == {REFUSED}
    assert answer(program, PROGRAM["clone3"][here], architecture=architecture) == UNKNOWN
