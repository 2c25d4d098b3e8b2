"""Runs a command and ends it, with all that it started, when the parent process has ended.

A script without any import of Proximo: `python process_guardian.py FD FOLDER COMMAND...`. FD is the reading end of a
pipe. The parent holds the other end open, and it closes when the parent closes it or ends for any reason. FOLDER, if it
is not empty, is then removed. It is kept if the command ends by itself: its log is still needed.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

GRACE_SECONDS = 10.0
POLL_SECONDS = 0.2
_PR_SET_CHILD_SUBREAPER = 36


def main(watched: int, folder: str, command: list[str]) -> int:
    """Run `command` until it ends or `watched` closes. Returns its exit status, 128 + signal where one ended it."""
    # Ctrl-C is for the parent, which then closes the pipe. The signals get functions, since processes that the
    # command starts would inherit ignored signals.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    with contextlib.suppress(OSError, AttributeError):  # so that orphans of the command become children of this process
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, close_fds=True)
    is_alone = False
    while process.poll() is None and not is_alone:
        ready, _, _ = select.select([watched], [], [], POLL_SECONDS)
        is_alone = bool(ready) and not os.read(watched, 1)
    status = process.poll()
    end_group(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and reap() and group_lives(process.pid):
        time.sleep(POLL_SECONDS / 4)
    end_group(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and reap():
        for child in children():  # those that left the group
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(POLL_SECONDS / 4)
    if is_alone and folder:
        shutil.rmtree(folder, ignore_errors=True)
    return 128 if status is None else (128 - status if status < 0 else status)


def end_group(leader: int, number: int) -> None:
    """Send a signal to a process group, if it still has members."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def group_lives(leader: int) -> bool:
    """Whether a process group has members."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def reap() -> bool:
    """Collect the children that have ended. False when none is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def children() -> list[int]:
    """Ids of this process's children, if the system reports them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
