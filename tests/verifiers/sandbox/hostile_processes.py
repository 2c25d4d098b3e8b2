"""Programs that start, signal, trace or outlive processes."""

from sandbox_cases import ends, says, tries

from proximo_verifiers.sandbox.jobs import Ending

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
        "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))",
        "resource.prlimit(os.getpid(), resource.RLIMIT_CPU, (0, 1))",
        "syscall(160, 164, 0, ctypes.byref((ctypes.c_ulong * 2)(1, 1)))",
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
