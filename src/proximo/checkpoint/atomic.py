"""Durable changes to files and folders: all of a change is on disk, or none.

Every effect on the file system goes through one of five one-line functions (`_make_folder`, `_write_file`, `_sync`,
`_rename`, `_delete`), so that a test can stop a save before, within and after each of them. Names of unfinished files
begin with `TEMPORARY_PREFIX`; `clear_temporaries` removes those that a crash left behind.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from proximo.errors import naming

TEMPORARY_PREFIX = ".partial-"


def temporary_beside(path: Path, purpose: str = "new") -> Path:
    """The temporary name for `path`, in the same folder: a rename within one file system is atomic."""
    return path.with_name(f"{TEMPORARY_PREFIX}{purpose}-{path.name}")


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """Replace the contents of `path` by `data`, durably. A reader sees the old contents or the new, never a part.

    Raises OSError that names `path` if the disk refuses; nothing unfinished is left behind.
    """
    temporary = temporary_beside(path)
    with naming(path):
        try:
            _write_file(temporary, data)
        except OSError:
            if temporary.exists():
                _delete(temporary)
            raise
    _sync(temporary)
    _rename(temporary, path)
    _sync(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file durably into a folder that is still temporary, so that nobody reads it yet."""
    _write_file(path, data)
    _sync(path)
    _sync(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, durably. It may exist already."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    _make_folder(folder)
    _sync(folder.parent)


def fsync_tree(folder: Path) -> None:
    """Sync every file below `folder`, then every folder, from the leaves up to `folder` itself.

    Files get the mode of `folder` without execution, as the umask would give: safetensors makes its files readable for
    their owner only.
    """
    mode = folder.stat().st_mode & 0o666
    for root, _, files in os.walk(folder, topdown=False):
        for name in sorted(files):
            Path(root, name).chmod(mode)
            _sync(Path(root, name))
        _sync(Path(root))


def sync_files(files: Sequence[Path]) -> None:
    """Sync files and the folders that they are in."""
    for path in files:
        _sync(path)
    for folder in sorted({path.parent for path in files}):
        _sync(folder)


def publish_folder(temporary: Path, final: Path) -> None:
    """Rename a finished, synced folder into place and sync its parent. An existing folder is moved aside first.

    Between the two renames nothing exists at `final`, so no pointer may name it.
    """
    if final.exists():
        _rename(final, _free(temporary_beside(final, "replaced")))
    _rename(temporary, final)
    _sync(final.parent)


def rename(path: Path, new_path: Path) -> None:
    """Rename a file or folder within one file system, durably. The target must not exist."""
    _rename(path, new_path)
    _sync(new_path.parent)
    if path.parent != new_path.parent:
        _sync(path.parent)


def remove(path: Path) -> None:
    """Delete a file or a folder. It is renamed first, so that a half-deleted one is never found under its name."""
    doomed = _free(temporary_beside(path, "removed"))
    _rename(path, doomed)
    _sync(path.parent)
    _delete(doomed)


def clear_temporaries(folder: Path) -> None:
    """Delete everything unfinished directly below `folder`."""
    for path in sorted(folder.glob(f"{TEMPORARY_PREFIX}*")):
        _delete(path)


def _free(path: Path) -> Path:
    if path.exists():
        _delete(path)
    return path


def _make_folder(folder: Path) -> None:
    folder.mkdir()


def _write_file(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename(path: Path, new_path: Path) -> None:
    path.replace(new_path)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
