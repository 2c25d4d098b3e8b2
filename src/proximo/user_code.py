"""User code: the form of its import paths, its errors, and the working directory that it is imported from."""

import os
import re
import sys
import traceback
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

from proximo.errors import ProximoError, TrainingError, disk_refused, memory_ran_out
from proximo_verifiers.callables import innermost

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""`package.module:function`."""


def error_text(error: BaseException) -> str:
    """The type of an error and its message, if it has one."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


def where_raised(error: BaseException, function: Any = None) -> str:
    """Where it was raised, as "file, line 3"; within a library, where the function's own file called that."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = innermost(function)
    code = getattr(inner, "__code__", None) or getattr(getattr(type(inner), "__call__", None), "__code__", None)  # noqa: B004
    own = getattr(code, "co_filename", None)
    at = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
    return f"{at.filename}, line {at.lineno}"


@contextmanager
def user_errors_named(what: str, function: Any) -> Generator[None]:
    """Inside, an exception of user-defined code becomes a TrainingError that names the code and the line.

    Proximo's own errors, out-of-memory errors and disk errors pass through unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ProximoError) or memory_ran_out(error) or disk_refused(error):
            raise
        raise TrainingError(f"{what} raised {error_text(error)} ({where_raised(error, function)})") from error


@contextmanager
def kept_working_directory() -> Generator[None]:
    """Restore the working directory, with a warning, if a user's function changed it.

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
                    f"a function of yours changed the working directory to {moved or 'a removed folder'}; it is "
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
