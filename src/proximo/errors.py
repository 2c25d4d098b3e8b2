"""The errors that Proximo raises on purpose. Not for bugs: those keep their traceback.

Every message says what was wanted, what came, where, and what to do. `exit_status` is what the command line
returns: 2 for a user's mistake, 1 for a failure of the run.
"""


class ProximoError(Exception):
    """Anything that Proximo refuses or gives up on, with a message meant for the user."""

    exit_status = 1


class UserError(ProximoError, ValueError):
    """Something that the user gave is wrong; nothing was written and nothing is lost."""

    exit_status = 2


class ConfigError(UserError):
    """A recipe, an override or a combination of options is wrong."""


class DataError(UserError):
    """A data source is missing or malformed; the message names file and row."""


class ModelError(UserError):
    """A model or tokenizer cannot be loaded, or cannot be used in the role that it was given."""


class RunFolderError(UserError):
    """A run folder cannot be started in, resumed from, or read."""


class MissingExtraError(UserError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


class TrainingError(ProximoError, RuntimeError):
    """The run cannot go on: an invariant broke, or too many failures were counted."""


class CheckpointError(ProximoError, RuntimeError):
    """A checkpoint is damaged, or does not fit the run that asked for it."""


class SandboxError(ProximoError, RuntimeError):
    """A program cannot be run under the guarantees that were asked for; the message names the missing one."""
