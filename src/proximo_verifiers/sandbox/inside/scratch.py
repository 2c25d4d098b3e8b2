"""Scratch folders on a disk, for machines without mount namespaces: creation, size checks, removal."""

import os

from proximo_verifiers.sandbox.kernel.namespaces import MAX_FILES


def make_folder_of_folders(parent: str) -> str:
    """Creates a folder in `parent` that only this user can enter."""
    path = f"{parent}/proximo-sandbox-{os.getpid()}-{os.urandom(8).hex()}"
    os.mkdir(path, 0o700)
    return path


def make_folder(parent: str, name: int) -> str:
    """Creates the empty folder of a program."""
    path = f"{parent}/{name}"
    os.mkdir(path, 0o700)
    return path


def exceeds(folder: str, *, num_bytes: int) -> bool:
    """True if the contents take more bytes, are too many files, or are nested beyond the length of a path."""
    taken, count, waiting = 0, 0, [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    count += 1
                    taken += entry.stat(follow_symlinks=False).st_blocks * 512
                    if count > MAX_FILES or taken > num_bytes:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except FileNotFoundError:
            # The program removed it in the meantime.
            continue
        except OSError:
            return True
    return False


def remove(folder: str) -> None:
    """Removes a folder of any depth, by moving the contents of subfolders to the top until none is left."""
    left = True
    while left:
        left = False
        with os.scandir(folder) as entries:
            contents = list(entries)
        for entry in contents:
            if entry.is_dir(follow_symlinks=False):
                _empty_into(folder, entry.path)
                left = True
            else:
                os.unlink(entry.path)
    os.rmdir(folder)


def _empty_into(top: str, folder: str) -> None:
    os.chmod(folder, 0o700)
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
            os.rename(entry.path, f"{top}/{os.urandom(8).hex()}")
    os.rmdir(folder)
