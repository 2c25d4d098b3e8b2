"""Keeps the working directory, which relative paths of a recipe are read from; imports user-defined modules from it."""

import os
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress


@contextmanager
def kept_working_directory() -> Generator[None]:
    """Where a function of the user's moves the process to another folder, it is back afterwards, with a warning.

    A resumed run would not know of the move, and every relative path of the recipe would mean another file.
    """
    start = _now()
    try:
        yield
    finally:
        moved = _now()
        if start is not None and moved != start:
            with suppress(OSError):
                os.chdir(start)
                warnings.warn(
                    f"a function of yours changed the working directory to {moved or 'a folder that is gone'}; it is "
                    f"{start} again, from which the recipe's relative paths are read: use absolute paths instead",
                    stacklevel=3,
                )


def _now() -> str | None:
    """None in a folder that was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


@contextmanager
def functions_of_the_working_directory() -> Generator[None]:
    """Append the working directory to the import path. It comes last, so that a stray file cannot shadow a package."""
    added = os.getcwd()
    sys.path.append(added)
    try:
        yield
    finally:
        sys.path.remove(added)
