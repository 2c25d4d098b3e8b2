"""Reads checkpoints: lists those in a folder, compares one with its manifest, and returns its saved state.

The manifest lists the files of a checkpoint with their sizes and hashes, which show whether it is complete.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never, TypeVar

from proximo.checkpoint.environment import installed_version
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


MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 8
"""Version of the checkpoint format: the manifest, `state.json` and the meaning of the other files. No other version is
read: raise it whenever earlier checkpoints can no longer be resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """Size and hash of one file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Every file of one checkpoint except the manifest, by its path below the checkpoint's folder (with "/")."""

    step: int
    metric: float | None
    """The metric by which the best checkpoint is chosen; None if it was not measured."""
    files: Mapping[str, FileEntry]
    saved_by: str | None = field(default_factory=lambda: installed_version("proximo"))
    """The version of Proximo, for the message of another version that cannot read the checkpoint."""

    def encode(self) -> bytes:
        """The manifest as JSON, with a hash of its content."""
        files = {name: {"num_bytes": entry.num_bytes, "sha256": entry.sha256} for name, entry in self.files.items()}
        described = {"format": FORMAT, "saved_by": self.saved_by, "step": self.step, "metric": self.metric}
        return _sealed({**described, "files": files})


class DamagedError(Exception):
    """A folder is not a complete checkpoint; the message names the file. Callers add where and what to do."""


def describe_folder(
    folder: Path, *, step: int, metric: float | None, known: Mapping[str, FileEntry] | None = None
) -> Manifest:
    """The manifest of the files below `folder` now. `known`: files that need not be hashed again."""
    known = known or {}
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    others = [name for name in paths if name not in known]
    hashed = dict(zip(others, describe_files([paths[name] for name in others]), strict=True))
    return Manifest(step=step, metric=metric, files={name: known.get(name) or hashed[name] for name in paths})


def describe_files(paths: Sequence[Path]) -> list[FileEntry]:
    """Size and hash of each file."""
    sizes = [path.stat().st_size for path in paths]
    return [FileEntry(num_bytes=n, sha256=sha) for n, sha in zip(sizes, _sha256_of(paths), strict=True)]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises DamagedError if it is missing or unreadable, CheckpointError if it has the format of another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise DamagedError(f"{path} is missing")
    try:
        data = path.read_bytes()
        content = json.loads(data)
        seal = content.pop("sha256", None)
        if seal is not None and _sealed(content) != data:
            raise DamagedError(f"{path} has other contents than when it was saved (its sha256 differs)")
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"the checkpoint cannot be read: {path} has format {content['format']!r}, and this version of Proximo "
                f"reads format {FORMAT}: continue "
                f"with the version that saved it ({content.get('saved_by') or 'its number is unknown'})"
            )
        if seal is None:
            raise DamagedError(f"{path} has no hash of its content")
        files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        return Manifest(step=content["step"], metric=content["metric"], files=files, saved_by=content["saved_by"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} is not a manifest ({error})") from error


def _sealed(content: Mapping[str, Any]) -> bytes:
    """The JSON text of a content with its hash. It is unique, so encoding it again reveals every changed bit."""
    text = json.dumps(content, indent=1, allow_nan=False)
    sealed = {"sha256": hashlib.sha256(text.encode()).hexdigest(), **content}
    return (json.dumps(sealed, indent=1, allow_nan=False) + "\n").encode()


def verify_folder(folder: Path, *, parts: Collection[str] | None) -> Manifest:
    """The manifest, after checking that every listed file has its size, and every file of `parts` its hash.

    parts: paths below `folder` of files, or of folders with everything below them; None means all. Files that the
    manifest does not list are ignored. Raises DamagedError at the first difference.
    """
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"{path} is missing")
        num_bytes = path.stat().st_size
        if num_bytes != entry.num_bytes:
            raise DamagedError(f"{path} has {num_bytes} bytes, the manifest says {entry.num_bytes}")
    hashed = [name for name in manifest.files if parts is None or any(_is_in(name, part) for part in parts)]
    for name, digest in zip(hashed, _sha256_of([folder / name for name in hashed]), strict=True):
        if digest != manifest.files[name].sha256:
            raise DamagedError(f"{folder / name} has other contents than when it was saved (its sha256 differs)")
    return manifest


def _is_in(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}/")


def _sha256_of(files: Sequence[Path]) -> list[str]:
    """The hash of each file. Files are hashed in parallel, because hashing releases the interpreter's lock."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_sha256, files))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
