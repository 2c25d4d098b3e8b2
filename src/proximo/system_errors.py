"""Classifies errors of libraries as what the system reported: out of memory, or a disk that refuses; names the file."""

import errno
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_ERRORS = frozenset(
    (
        errno.EACCES,
        errno.EBUSY,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.EISDIR,
        errno.ELOOP,
        errno.EMFILE,
        errno.ENAMETOOLONG,
        errno.ENFILE,
        errno.ENODEV,
        errno.ENOENT,
        errno.ENOLCK,
        errno.ENOSPC,
        errno.ENOTCONN,
        errno.ENOTDIR,
        errno.ENXIO,
        errno.EPERM,
        errno.EROFS,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ETXTBSY,
    )
)
"""What a file system says that is full, read-only, broken or gone, and not a mistake of the program."""
WRITE_ERRORS = frozenset((errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.ESTALE))
"""What a write to an open file says, and a network does not."""
MEMORY_ERRORS = (errno.ENOMEM, errno.EAGAIN)
OUT_OF_MEMORY = re.compile(
    r"bad_alloc|DefaultCPUAllocator|out of memory|cannot allocate memory|failed to map segment|can't start new thread"
    r"|memory allocation|thread pool has not been initialized",
    re.IGNORECASE,
)
"""How libraries say it whose errors have no type of their own. A thread needs memory for its stack."""
SYSTEM_NUMBER = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")
"""How libraries written in Rust quote the system."""


def memory_ran_out(error: BaseException) -> bool:
    """Whether it, or what it came from, is an allocation that failed, on a device or in this process."""
    return any(
        isinstance(each, MemoryError)
        or type(each).__name__ == "OutOfMemoryError"
        or _number(each) in MEMORY_ERRORS
        or (isinstance(each, RuntimeError | ImportError) and OUT_OF_MEMORY.search(str(each)) is not None)
        or (type(each).__name__ == "PanicException" and OUT_OF_MEMORY.search(str(each)) is not None)
        for each in _chain(error)
    )


def disk_refused(error: BaseException) -> bool:
    """Whether it is a file or a folder that could not be read or written, by whatever library it is told."""
    return _number(error) in DISK_ERRORS


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Give an OSError that names no file the name of `path`: a write to a full disk says only that the disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in WRITE_ERRORS:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    quoted = SYSTEM_NUMBER.search(str(error))
    return int(quoted[1] or quoted[2]) if quoted else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
