"""Programs that ask the kernel for more than Python needs."""

from sandbox_cases import PRELUDE, Case, tries

from proximo_verifiers.sandbox.jobs import Ending

KERNEL = (
    tries(
        "namespaces",
        "syscall(272, 97, 0x10000000)",
        "syscall(272, 97, 0x20000)",
        "syscall(272, 97, 0x20000000)",
        "syscall(272, 97, 0x40000000)",
        "syscall(308, 268, 0, 0)",
        "syscall(272, 97, 0x400)",
    ),
    tries(
        "doors into the kernel",
        *(
            f"syscall({x86}, {arm}, 0, 0, 0, 0, 0, 0)"
            for x86, arm in (
                (321, 280),
                (425, 425),
                (426, 426),
                (427, 427),
                (298, 241),
                (250, 219),
                (248, 217),
                (249, 218),
                (323, 282),
                (175, 105),
                (313, 273),
                (246, 104),
                (320, 294),
                (169, 142),
                (167, 224),
                (103, 116),
                (135, 92),
                (179, 60),
                (300, 262),
                (253, 26),
                (294, 26),
                (444, 444),
                (317, 277),
                (126, 91),
                (105, 146),
                (117, 147),
                (106, 144),
                (116, 159),
                (155, 41),
                (161, 51),
                (163, 89),
                (170, 161),
                (164, 170),
                (227, 112),
                (237, 235),
                (256, 238),
                (279, 239),
                (329, 288),
                (330, 289),
                (448, 448),
                (451, 451),
            )
        ),
    ),
    tries(
        "shared memory, queues and semaphores",
        "syscall(29, 194, 7, 4096, 0o1666)",
        "syscall(68, 186, 7, 0o1666)",
        "syscall(64, 190, 7, 1, 0o1666)",
        "syscall(240, 180, b'proximo-escape', 0o102, 0o666, None)",
        "multiprocessing.shared_memory.SharedMemory('proximo-escape', create=True, size=4096)",
        "multiprocessing.get_context('fork').Semaphore()",
        "syscall(30, 196, 0, 0, 0)",
        before="import multiprocessing.shared_memory",
    ),
    tries(
        "prctl",
        *(
            f"syscall(157, 167, {option}, {value}, 0, 0, 0)"
            for option, value in (
                (4, 1),
                (1, 0),
                (22, 2),
                (24, 0),
                (28, 0),
                (47, 2),
                (36, 1),
                (8, 1),
                (35, 1),
                (0x59616D61, -1),
                (23, 0),
            )
        ),
    ),
    tries(
        "other users",
        "os.setuid(0)",
        "os.seteuid(0)",
        "os.setgid(0)",
        "os.setgroups([0])",
        "os.setresuid(0, 0, 0)",
        "os.setreuid(1, 1)",
        "os.initgroups('root', 0)",
    ),
    tries(
        "terminals and devices",
        "fcntl.ioctl(0, 0x5412, b'x')",
        "fcntl.ioctl(1, 0x540E, 0)",
        "fcntl.ioctl(2, 0x541C, b'x' * 9)",
        "fcntl.fcntl(1, 8, 1)",
        "fcntl.fcntl(1, 10, 9)",
        "fcntl.fcntl(1, 1031, 1 << 20)",
        "fcntl.fcntl(0, 1024, 1)",
        "fcntl.fcntl(1, 1033, 1)",
        before="import fcntl",
    ),
    tries(
        "locks by which programs could speak to each other",
        "fcntl.flock(library, fcntl.LOCK_SH)",
        "fcntl.flock(library, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(os.open('.', os.O_RDONLY), fcntl.LOCK_EX)",
        "fcntl.lockf(library, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 77)",
        *(f"fcntl.fcntl(library, {command}, bytes(32))" for command in (5, 6, 7, 36, 37, 38)),
        *(f"fcntl.fcntl(library, {command}, 0)" for command in (1024, 1025, 1026)),
        "syscall(73, 32, library, 1)",
        before="import fcntl\nlibrary = os.open(os.__file__, os.O_RDONLY)",
    ),
    tries(
        "waking others who wait at a place in a file of the library",
        *(f"syscall(202, 98, page, {operation}, 9, None, page, 0)" for operation in (1, 3, 4, 5, 10, 0x101)),
        before="""
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
page = libc.mmap(None, ctypes.c_size_t(4096), 1, 1, os.open(os.__file__, os.O_RDONLY), ctypes.c_long(0))
""",
    ),
    tries(
        "whether other processes are there",
        "os.sched_getaffinity(VICTIM)",
        "os.sched_getscheduler(1)",
        "os.sched_getparam(os.getpid() - 1)",
        "os.getpgid(1)",
        "os.getsid(os.getpid() + 1)",
        "os.getpriority(os.PRIO_PROCESS, 1)",
        "os.getpriority(os.PRIO_USER, 1000)",
    ),
    tries(
        "clocks and names of the machine",
        "time.clock_settime(time.CLOCK_REALTIME, 0)",
        "socket.sethostname('x')",
        "syscall(162, 81)",
        "syscall(171, 162, b'x', 1)",
        before="import time, socket",
    ),
    Case(
        name="calls of the 32-bit kind",
        source=PRELUDE
        + """
import mmap
code = bytes.fromhex("b814000000cd80c3")  # mov eax, 20 (getpid of i386); int 0x80; ret
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print("BROKEN", ctypes.CFUNCTYPE(ctypes.c_int)(address)())
""",
        endings=(Ending.SIGNAL,),
        status=31,
        machine="x86_64",
    ),
    Case(
        name="calls of x32",
        source=PRELUDE + "print('BROKEN', syscall(0x40000000 | 39, 172))",
        endings=(Ending.SIGNAL,),
        status=31,
        machine="x86_64",
    ),
)
