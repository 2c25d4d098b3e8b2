"""The cache of compiled kernels, and the checks before a cached library is loaded.

A library is code. It is loaded only if no other user can have written it, and if it is complete: its name ends with the
hash of its content, `kernels-FINGERPRINT-HASH.so`.
"""

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

LOG = logging.getLogger("proximo.kernels")

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """The cache folder, if no other user can write to it or replace a folder above it; else a temporary folder."""
    with contextlib.suppress(OSError, RuntimeError):  # there is no home folder, or it is not writable
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proximo"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        if (open_to_others := _open_to_others(folder)) is not None:
            LOG.warning(
                "others may write to %s: the kernels in C are not kept there, but compiled in every process anew "
                "(chmod go-w %s)",
                *(open_to_others, open_to_others),
            )
        elif os.access(folder, os.W_OK):
            return folder
    return _own_folder()


def find_cached(folder: Path, fingerprint: str) -> Path | None:
    """The cached library with this fingerprint, or None. Removes libraries that are damaged or not ours."""
    for path in sorted(folder.glob(f"kernels-{fingerprint}-*.so")):
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            if _is_ours(path) and path.stem.endswith(f"-{_hash(path.read_bytes())}"):
                return path
            path.unlink()
    return None


def add_to_cache(folder: Path, fingerprint: str, library: bytes) -> Path:
    """Add a library to the cache. It is written elsewhere and renamed, so several processes may do this at once."""
    path = folder / f"kernels-{fingerprint}-{_hash(library)}.so"
    with tempfile.TemporaryDirectory(dir=folder) as temporary, Path(temporary, path.name).open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(library)
        file.flush()
        os.fsync(file.fileno())
        Path(temporary, path.name).replace(path)
    return path


def _open_to_others(folder: Path) -> Path | None:
    """The first of this folder and its parents that another user could write to, or None.

    A parent with the sticky bit, such as /tmp, is safe: there nobody can rename what belongs to another user.
    """
    for parent in (folder, *folder.parents):
        state = parent.stat()
        sticky = parent != folder and state.st_mode & stat.S_ISVTX
        if state.st_uid not in (0, os.getuid()) or (state.st_mode & _OTHERS_WRITE and not sticky):
            return parent
    return None


def _is_ours(path: Path) -> bool:
    state = path.lstat()
    return stat.S_ISREG(state.st_mode) and state.st_uid in (0, os.getuid()) and not state.st_mode & _OTHERS_WRITE


def _hash(library: bytes) -> str:
    return hashlib.blake2b(library, digest_size=16).hexdigest()


@cache
def _own_folder() -> Path:
    """A temporary folder of this process."""
    folder = tempfile.TemporaryDirectory(prefix="proximo-kernels-")
    _OWN_FOLDERS.append(folder)
    return Path(folder.name)


_OWN_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
