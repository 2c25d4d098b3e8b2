"""The errors of this package. Each message says what was wanted, what came, and what to do."""

from collections.abc import Collection, Iterable


class VerifierError(Exception):
    """Anything that this package refuses or gives up on, with a message for the user."""


class ConfigError(VerifierError, ValueError):
    """An option of a verifier or of its workers is wrong."""


class DataError(VerifierError, ValueError):
    """The answers to a row cannot be graded, or the row cannot be sent to a worker."""


class MissingExtraError(VerifierError, ImportError):
    """An optional package is not installed; the message names it."""


class SandboxError(VerifierError, RuntimeError):
    """A program cannot be run under the guarantees that were asked for; the message names the missing one."""


class WorkersError(VerifierError, RuntimeError):
    """The workers of a verifier cannot be started, or have ended."""


def check_choices(refusal: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises ConfigError for a name that is not known, with the nearest that is. `refusal` begins the message."""
    for name in given:
        if name not in known:
            from difflib import get_close_matches  # needed for a mistake alone

            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
            raise ConfigError(f"{refusal} {name!r}; {hint}")
