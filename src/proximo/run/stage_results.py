"""What an earlier stage of a pipeline made, by `@` and its name. Not what `@` may stand before: config/stages.py."""

from pathlib import Path

from proximo.checkpoint.store import CheckpointStore
from proximo.config.stages import MARK
from proximo.errors import ConfigError
from proximo.run.checkpoint_lookup import ROLES


def stage_result(folder: Path, reference: str) -> Path:
    """The folder of the model that a stage made: its best checkpoint where one was measured, else its latest.

    Raises ConfigError where that stage has no checkpoint.
    """
    stage = reference.removeprefix(MARK)
    store = CheckpointStore(folder / stage / "checkpoints")
    checkpoint = store.best() or store.latest()
    if checkpoint is None:
        raise ConfigError(
            f"{reference} names the result of stage {stage}, but {folder / stage} has no checkpoint: "
            f"give the recipe a section {stage}, or name a model by its path"
        )
    role = next(role for role in ROLES if (checkpoint.folder / role).is_dir())
    return checkpoint.path(role)
