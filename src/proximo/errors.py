"""The errors that Proximo raises on purpose, and recognition of system errors: no memory, a disk that refuses.

Every message says what was wanted, what came, where, and what to do. `exit_status` is what the command line
returns: 2 for a user's mistake, 1 for a failure of the run. Bugs keep their own type and their traceback.
"""

import errno
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from proximo.message_text import with_addresses
from proximo_verifiers import errors as verifiers

HIDDEN = "***"
_WORD = r"(?:[A-Za-z]{1,16}\d{0,4}|\d{1,6})"
ANCHOR = rf"{_WORD}(?:[-_.]{_WORD})*"
"""A place on a page (`#own-optimizer`, `#L10`): short words. A token is one long word or has a name."""
SECRETS = (
    (re.compile(r"""(?<=://)[^\s/?#@'"]+@|\b[^\s/:@'"=]+:[^\s/:@'"]+@(?=\w)"""), f"{HIDDEN}@"),
    (re.compile(r"""(\w://[^\s?#'"]*\?)[^\s'"]+"""), rf"\1{HIDDEN}"),
    (re.compile(rf"""(\w://[^\s?#'"]*#)(?!{ANCHOR}[^\w=%&]?(?=[\s'"]|$))[^\s'"]+"""), rf"\1{HIDDEN}"),
    (
        re.compile(
            r"""(?i)\b((?:api_?|access_|secret_)key|(?:api_|access_|auth_)?token|secret|password|signature)=[^\s&'"]+"""
        ),
        rf"\1={HIDDEN}",
    ),
)
"""Possible secrets in an address: user and password; the part after `?`; the part after `#` unless it is an anchor;
values with the name of a secret."""
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
"""Errors of a file system that is full, read-only, broken or missing, not of a mistake in the program."""
WRITE_ERRORS = frozenset((errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.ESTALE))
"""Errors of writes to an open file that a network does not give."""
MEMORY_ERRORS = (errno.ENOMEM, errno.EAGAIN)
OUT_OF_MEMORY = re.compile(
    r"bad_alloc|DefaultCPUAllocator|out of memory|cannot allocate memory|failed to map segment|can't start new thread"
    r"|memory allocation|thread pool has not been initialized",
    re.IGNORECASE,
)
"""Messages of libraries without an own type for this error. A thread needs memory for its stack."""
SYSTEM_NUMBER = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")
"""How libraries written in Rust quote an error of the system."""


def redacted(text: str) -> str:
    """A message for a log, with possible secrets removed."""
    for pattern, instead in SECRETS:
        text = pattern.sub(instead, text)
    return text


class ProximoError(Exception):
    """Anything that Proximo refuses or gives up on, with a message meant for the user."""

    exit_status = 1

    def __str__(self) -> str:
        return with_addresses(redacted(super().__str__()))


class UserError(ProximoError, ValueError):
    """Something that the user gave is wrong; nothing was written and nothing is lost."""

    exit_status = 2


class ConfigError(UserError, verifiers.ConfigError):
    """A recipe, an override or a combination of options is wrong."""


class DataError(UserError, verifiers.DataError):
    """A data source is missing or malformed; the message names file and row."""


class ModelError(UserError):
    """A model or tokenizer cannot be loaded, or cannot be used in the role that it was given."""


class RunFolderError(UserError):
    """A run folder cannot be started in, resumed from, or read."""


class MissingExtraError(UserError, verifiers.MissingExtraError):
    """An optional dependency is not installed; the message names the extra."""


class TrainingError(ProximoError, RuntimeError):
    """The run cannot continue: an invariant broke, or too many failures were counted."""


class GuardError(TrainingError):
    """A guard ended the run before the step changed anything: what was trained before it is intact, and is saved."""


class RankError(ProximoError, RuntimeError):
    """Another rank of the run failed, is missing, or has other numbers; the message names it."""

    def __init__(self, message: str, *, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class JoinError(RankError):
    """This rank found no other rank of its run, so that none of them can report why."""


class CheckpointError(ProximoError, RuntimeError):
    """A checkpoint is damaged, or does not fit the run that asked for it."""


class SandboxError(ProximoError, verifiers.SandboxError):
    """A program cannot be run under the guarantees that were asked for; the message names the missing one."""


_OWN: dict[type[verifiers.VerifierError], type[ProximoError]] = {
    verifiers.ConfigError: ConfigError,
    verifiers.DataError: DataError,
    verifiers.MissingExtraError: MissingExtraError,
    verifiers.SandboxError: SandboxError,
    verifiers.WorkersError: TrainingError,
}


@contextmanager
def as_own_errors() -> Generator[None]:
    """Inside, an error of `proximo_verifiers` is raised as the one here, which has an exit status.

    Those of the same names inherit from it, so that a verifier may raise either.
    """
    try:
        yield
    except verifiers.VerifierError as error:
        if isinstance(error, ProximoError):
            raise
        raise _OWN[type(error)](str(error)) from error


def memory_ran_out(error: BaseException) -> bool:
    """Whether the error or one of its causes is a failed allocation, on a device or in this process."""
    return any(
        isinstance(each, MemoryError)
        or type(each).__name__ == "OutOfMemoryError"
        or _number(each) in MEMORY_ERRORS
        or (isinstance(each, RuntimeError | ImportError) and OUT_OF_MEMORY.search(str(each)) is not None)
        or (type(each).__name__ == "PanicException" and OUT_OF_MEMORY.search(str(each)) is not None)
        for each in _chain(error)
    )


def disk_refused(error: BaseException) -> bool:
    """Whether a file or folder could not be read or written, in the words of any library."""
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
