"""Where compiled kernels are kept, and whether what is there may be loaded. Not what they are.

A library is code: it is loaded only if nobody else can have written it, and if it is whole. Its name ends with the hash
of its content, `kernels-FINGERPRINT-HASH.so`.
"""

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

LOG = logging.getLogger("proximo.native")

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def folder_for_kernels() -> Path:
    """A folder that nobody else can write to, now or by way of a folder above it; else one for this process alone."""
    with contextlib.suppress(OSError, RuntimeError):  # nobody's home is known, or it cannot be written to
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


def find_kept(folder: Path, fingerprint: str) -> Path | None:
    """The library with this fingerprint. What is damaged, or may be another's, is removed."""
    for path in sorted(folder.glob(f"kernels-{fingerprint}-*.so")):
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            if _is_ours(path) and path.stem.endswith(f"-{_hash(path.read_bytes())}"):
                return path
            path.unlink()
    return None


def keep(folder: Path, fingerprint: str, library: bytes) -> Path:
    """Written aside and put in place whole: several processes may do it at the same time."""
    path = folder / f"kernels-{fingerprint}-{_hash(library)}.so"
    with tempfile.TemporaryDirectory(dir=folder) as aside, Path(aside, path.name).open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(library)
        file.flush()
        os.fsync(file.fileno())
        Path(aside, path.name).replace(path)
    return path


def _open_to_others(folder: Path) -> Path | None:
    """The first of this folder and those above it in which somebody else could put another in its place.

    Above it, a folder like /tmp will do: in a sticky one nobody can move what belongs to another.
    """
    for each in (folder, *folder.parents):
        state = each.stat()
        sticky = each != folder and state.st_mode & stat.S_ISVTX
        if state.st_uid not in (0, os.getuid()) or (state.st_mode & _OTHERS_WRITE and not sticky):
            return each
    return None


def _is_ours(path: Path) -> bool:
    state = path.lstat()
    return stat.S_ISREG(state.st_mode) and state.st_uid in (0, os.getuid()) and not state.st_mode & _OTHERS_WRITE


def _hash(library: bytes) -> str:
    return hashlib.blake2b(library, digest_size=16).hexdigest()


@cache
def _own_folder() -> Path:
    """For this process alone."""
    kept = tempfile.TemporaryDirectory(prefix="proximo-kernels-")
    _KEPT.append(kept)
    return Path(kept.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
