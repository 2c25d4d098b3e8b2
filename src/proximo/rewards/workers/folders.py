"""The temporary folders of workers, and what killed processes left of them. Not what a worker writes there.

A folder is locked by the process that made it. The kernel drops the lock when that process ends, however it does, so a
folder that can be locked belongs to nobody any more.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "proximo-worker-"


class WorkerFolder:
    """A new folder, this process's own until it is removed."""

    def __init__(self) -> None:
        while True:
            self.path = tempfile.mkdtemp(prefix=PREFIX)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(BlockingIOError):  # who has it before this process is sweeping it away
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(self.path, self._lock):
                    break
            os.close(self._lock)  # somebody swept it away before it was locked
        # A verifier may run programs as another user, who must get to what it makes there and need not look around.
        os.chmod(self.path, 0o711)

    def remove(self) -> None:
        """With everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep_folders() -> None:
    """Remove the folders of workers whose process is gone. What is another user's, or no folder, stays."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(path, descriptor):
            shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        pass  # its process lives
    finally:
        os.close(descriptor)


def _is_at(path: str | Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
