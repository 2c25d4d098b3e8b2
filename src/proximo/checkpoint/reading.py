"""Reads checkpoints: lists those in a folder, compares one with its manifest, and returns its saved state."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never, TypeVar

from proximo.checkpoint.manifest import STATE, DamagedError, verify_folder
from proximo.errors import CheckpointError

ROLES = ("policy", "reward", "value", "average", "reference")
"""Model folders of a checkpoint, in this order: the first one present is the model that the run trained."""
STEP_NAME = re.compile(r"step-(\d{6,})")
Record = TypeVar("Record")
_ANOTHER_VERSION = (
    "another version of Proximo saved it (`saved_by` in its manifest.json). Continue with that version, or start a "
    "run in another folder"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One complete checkpoint on disk."""

    step: int
    folder: Path
    state: Mapping[str, Any]
    """The `state` that was given to `CheckpointStore.save`."""
    metric: float | None

    def path(self, name: str) -> Path:
        """The file or folder that the writer `name` made. Raises CheckpointError if there was no such writer."""
        path = self.folder / name
        if not path.exists():
            held = ", ".join(sorted(entry.name for entry in self.folder.iterdir()))
            raise CheckpointError(f"the checkpoint {self.folder} has no {name!r}; it holds {held}")
        return path

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles whose model it holds; the one that the run trained comes first."""
        return tuple(role for role in ROLES if (self.folder / role).is_dir())


def folder_of(checkpoints: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return checkpoints / f"step-{step:06d}"


def saved_steps(folder: Path) -> tuple[int, ...]:
    """The steps with a checkpoint in a folder of checkpoints, ascending, damaged ones too."""
    names = (STEP_NAME.fullmatch(path.name) for path in folder.glob("step-*"))
    return tuple(sorted(int(name[1]) for name in names if name is not None))


def open_checkpoint(checkpoints: Path, step: int, *, parts: Collection[str] | None) -> Checkpoint:
    """The checkpoint of a step, compared with its manifest as `verify_folder` does. Raises DamagedError."""
    folder = folder_of(checkpoints, step)
    manifest = verify_folder(folder, parts=None if parts is None else (STATE, *parts))
    if manifest.step != step:
        raise DamagedError(f"{folder} holds the checkpoint of step {manifest.step}: it was renamed")
    state = json.loads((folder / STATE).read_bytes(), object_hook=SavedState)
    return Checkpoint(step=step, folder=folder, state=state, metric=manifest.metric)


def left_by_failed_save(checkpoints: Path) -> str:
    """Says which checkpoint to resume from after a failed save."""
    if saved_steps(checkpoints):  # a checkpoint gets its name only when it is complete
        return "The latest complete checkpoint is untouched: make room, or repair the disk, and continue with --resume"
    return (
        "It would have been the first one, so there is none to resume from: make room, or repair the disk, and start "
        "again with --resume=auto or --overwrite"
    )


class SavedState(dict[str, Any]):
    """A dict whose `[]` raises CheckpointError for a missing key."""

    def __missing__(self, key: str) -> Never:
        """Raises CheckpointError that names the missing entry."""
        raise CheckpointError(f"the state of the checkpoint has no {key!r}: {_ANOTHER_VERSION}")


def as_record(record_type: Callable[..., Record], saved: Mapping[str, Any]) -> Record:
    """Builds a dataclass from fields that were saved by name.

    Raises CheckpointError for a value without a field, and for a field without value or default.
    """
    try:
        return record_type(**saved)
    except TypeError as error:
        raise CheckpointError(f"the state of the checkpoint does not fit ({error}): {_ANOTHER_VERSION}") from error


def encode_state(state: Mapping[str, Any]) -> bytes:
    """The state as JSON text. Raises TypeError if reading it back would give something else."""
    text = json.dumps(state, indent=1, allow_nan=False)
    if json.loads(text) != state:
        raise TypeError(
            "the state of a checkpoint must come back from JSON as it went in: keys must be strings, and "
            "sequences lists (a tuple would come back as a list)"
        )
    return (text + "\n").encode()
