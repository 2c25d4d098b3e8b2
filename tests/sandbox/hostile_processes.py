"""Programs that start, signal, trace or outlive processes, or ask the kernel for more than Python needs."""

from proximo.sandbox.jobs import Ending
from sandbox.cases import PRELUDE, Case, ends, says, tries

PROCESSES = (
    tries(
        "fork in every form",
        "os.fork()",
        "os.forkpty()",
        "pty.fork()",
        "syscall(57, 999, 0)",
        "syscall(58, 999, 0)",
        "syscall(56, 220, 17, 0, 0, 0, 0)",
        "syscall(56, 220, 0x4111, 0, 0, 0, 0)",
        "syscall(56, 220, 0x100, 0, 0, 0, 0)",
        "syscall(435, 435, bytes(88), 88)",
        "syscall(56, 220, 0x10000000 | 17, 0, 0, 0, 0)",
        before="import pty",
    ),
    tries(
        "programs started",
        "os.system('true') and refuse()",
        "subprocess.run(['/bin/sh', '-c', 'true'])",
        "subprocess.Popen('true', shell=True)",
        "os.posix_spawn('/bin/sh', ['sh'], {})",
        "os.popen('true').read()",
        "multiprocessing.get_context('fork').Process(target=print).start()",
        "multiprocessing.get_context('spawn').Process(target=print).start()",
        "concurrent.futures.ProcessPoolExecutor(1).submit(print).result()",
        before="""import concurrent.futures, multiprocessing, subprocess
def refuse(): raise OSError
""",
    ),
    tries(
        "files executed",
        "os.execv('/bin/sh', ['sh'])",
        "os.execv(sys.executable, ['python'])",
        "os.execv('own', ['own'])",
        "os.execve(os.open('own', os.O_RDONLY), ['own'], {})",
        "syscall(59, 221, b'/bin/sh', None, None)",
        "syscall(322, 281, -100, b'own', None, None, 0)",
        "os.memfd_create('proximo-escape')",
        "syscall(319, 279, b'x', 0)",
        "syscall(447, 447, 0)",
        before="open('own', 'w').write('#!/bin/sh\\necho BROKEN\\n')",
    ),
    tries(
        "a daemon by two forks",
        "daemon()",
        before="""
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            import time
            time.sleep(60)
""",
    ),
    ends(
        "a fork bomb",
        """
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        Ending.CPU,
        cpu_seconds=0.2,
    ),
    says(
        "no more threads than it may have",
        """
import threading, time
threading.stack_size(32768)
started = 0
try:
    while started < 200:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        started += 1
except RuntimeError as error:
    print(started < 16, error)
""",
        "True can't start new thread\n",
    ),
    ends(
        "threads that all spin",
        """
import threading
def spin():
    while True:
        pass
try:
    for _ in range(30):
        threading.Thread(target=spin).start()
except RuntimeError:
    spin()
""",
        Ending.CPU,
        cpu_seconds=0.2,
    ),
    tries("sessions and groups", "os.setsid()", "os.setpgid(0, 0)", "os.tcsetpgrp(0, 1)", "os.nice(-5)", "os.nice(5)"),
)

SIGNALS = (
    tries(
        "signals to others",
        "os.kill(-1, 9)",
        "os.kill(VICTIM, 9)",
        "os.kill(os.getppid(), 9)",
        "os.kill(1, 9)",
        "os.kill(0, 9)",
        "os.killpg(0, 9)",
        "os.kill(PARENT, 15)",
        "os.kill(2, 9)",
        "syscall(234, 131, VICTIM, VICTIM, 9)",
        "syscall(200, 130, VICTIM, 9)",
        "syscall(129, 138, VICTIM, 9, bytes(128))",
        "syscall(297, 240, VICTIM, VICTIM, 9, bytes(128))",
        "os.pidfd_open(VICTIM)",
        "signal.pidfd_send_signal(3, 9)",
        "syscall(424, 424, 0, 9, None, 0)",
        before="import signal",
    ),
    tries(
        "tracing and looking into others",
        "syscall(101, 117, 16, VICTIM, 0, 0)",
        "syscall(101, 117, 0, 0, 0, 0)",
        "syscall(101, 117, 0x4206, PARENT, 0, 0)",
        "syscall(310, 270, VICTIM, bytes(16), 1, bytes(16), 1, 0)",
        "syscall(311, 271, VICTIM, bytes(16), 1, bytes(16), 1, 0)",
        "syscall(312, 272, VICTIM, VICTIM, 0, 0, 0)",
        "syscall(438, 438, 3, 1, 0)",
        "syscall(440, 440, 3, bytes(16), 1, 0, 0)",
    ),
    tries(
        "limits and priorities of others",
        "resource.prlimit(VICTIM, resource.RLIMIT_CPU, (1, 1))",
        "resource.prlimit(PARENT, resource.RLIMIT_NOFILE)",
        "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)",
        "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
        "os.sched_setaffinity(VICTIM, {0})",
        "os.sched_setaffinity(0, {0})",
        "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))",
        "syscall(251, 30, 1, 0, 0)",
        before="import resource",
    ),
    tries(
        "its own limits raised",
        *(
            f"resource.setrlimit(resource.{name}, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))"
            for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_STACK")
        ),
        "resource.setrlimit(resource.RLIMIT_CORE, (1, 1))",
        before="import resource",
    ),
    ends(
        "it cannot be signalled by waiting",
        """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
while True:
    pass
""",
        Ending.CPU,
        cpu_seconds=0.2,
    ),
    ends("it stops itself", "import signal\nos.kill(os.getpid(), signal.SIGSTOP)\n", Ending.WALL, wall_seconds=0.3),
)

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
