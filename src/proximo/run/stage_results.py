"""Resolves `@stage` to the model that an earlier stage of a pipeline trained."""

from pathlib import Path

from proximo.checkpoint.store import CheckpointStore
from proximo.config.stages import MARK
from proximo.errors import ConfigError


def stage_result(folder: Path, reference: str) -> Path:
    """The model folder of a stage: from its best checkpoint if one was measured, otherwise from its latest.

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
    return checkpoint.path(checkpoint.roles[0])
