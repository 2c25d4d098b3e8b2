"""Temporary folders of workers, and the removal of folders that killed processes left behind.

A folder is locked by the process that made it. The kernel releases the lock when that process ends in any way, so a
folder that can be locked is no longer in use.
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
    """A new temporary folder, locked by this process until it is removed."""

    def __init__(self) -> None:
        while True:
            self.path = tempfile.mkdtemp(prefix=PREFIX)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(BlockingIOError):  # another process locked it first, to sweep it away
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(self.path, self._lock):
                    break
            os.close(self._lock)  # it was swept away before it was locked
        # A verifier may run programs as another user, who must reach its files here but need not list the folder.
        os.chmod(self.path, 0o711)

    def remove(self) -> None:
        """Removes the folder with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep_folders() -> None:
    """Removes the folders of workers whose process is gone. Leaves other users' folders and other files alone."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                _remove_if_unused(path)


def _remove_if_unused(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(path, descriptor):
            shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        pass  # its process is alive
    finally:
        os.close(descriptor)


def _is_at(path: str | Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
