"""The errors of this package. Each message says what was wanted, what came, and what to do."""


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
