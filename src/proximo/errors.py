"""The errors that Proximo raises on purpose. Not for bugs: those keep their traceback.

Every message says what was wanted, what came, where, and what to do. `exit_status` is what the command line
returns: 2 for a user's mistake, 1 for a failure of the run.
"""

import re
from collections.abc import Generator
from contextlib import contextmanager

from proximo.pages import with_addresses
from proximo_verifiers import errors as verifiers

HIDDEN = "***"
_WORD = r"(?:[A-Za-z]{1,16}\d{0,4}|\d{1,6})"
ANCHOR = rf"{_WORD}(?:[-_.]{_WORD})*"
"""A place on a page, such as `#own-optimizer` or `#L10`: short words, where a token is one long one or has a name."""
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
"""What may be a secret in an address: user and password; what follows `?`; what follows `#` and is no mere anchor;
values by the names of secrets."""


def redacted(text: str) -> str:
    """A message as it may stand in a log: without what may be a secret in it."""
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
    """The run cannot go on: an invariant broke, or too many failures were counted."""


class GuardError(TrainingError):
    """A guard ended the run before the step changed anything: what was trained before it is intact, and is saved."""


class RankError(ProximoError, RuntimeError):
    """Another rank of the run failed, is missing, or has other numbers; the message names it."""

    def __init__(self, message: str, *, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class JoinError(RankError):
    """This rank met no other rank of its run, so that none of them can say why."""


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
