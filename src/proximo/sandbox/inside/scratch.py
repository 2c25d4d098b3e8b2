"""Programs' folders on a disk, for machines without mounts: made, watched and removed. Elsewhere: namespaces.py."""

import os

from proximo.sandbox.kernel.namespaces import MAX_FILES


def make_folder_of_folders(parent: str) -> str:
    """A new folder in `parent` that only this user can enter."""
    path = f"{parent}/proximo-sandbox-{os.getpid()}-{os.urandom(8).hex()}"
    os.mkdir(path, 0o700)
    return path


def make_folder(parent: str, name: int) -> str:
    """An empty one for a program."""
    path = f"{parent}/{name}"
    os.mkdir(path, 0o700)
    return path


def exceeds(folder: str, *, num_bytes: int) -> bool:
    """True where what is in it takes more, is more than a program may have, or lies deeper than a path can say."""
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
            # The program has removed it meanwhile.
            continue
        except OSError:
            return True
    return False


def remove(folder: str) -> None:
    """Whatever is in it, however deep: folders are emptied into the topmost one until there are none."""
    left = True
    while left:
        left = False
        with os.scandir(folder) as entries:
            found = list(entries)
        for entry in found:
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
