"""The list of a checkpoint's files with sizes and hashes: what "complete" means. Not which checkpoints to keep."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """What one file must be."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Every file of one checkpoint, by its path below the checkpoint's folder (with "/"); not the manifest itself."""

    step: int
    metric: float | None
    """What the checkpoint is worth to the one who chooses the best; None where it was not measured."""
    files: Mapping[str, FileEntry]

    def encode(self) -> bytes:
        """The manifest as JSON."""
        files = {name: {"num_bytes": entry.num_bytes, "sha256": entry.sha256} for name, entry in self.files.items()}
        content = {"format": FORMAT, "step": self.step, "metric": self.metric, "files": files}
        return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


class DamagedError(Exception):
    """A folder is not a complete checkpoint; the message names the file. Callers add where and what to do."""


def describe_folder(folder: Path, *, step: int, metric: float | None) -> Manifest:
    """The manifest of the files that lie below `folder` now."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {
        path.relative_to(folder).as_posix(): FileEntry(num_bytes=path.stat().st_size, sha256=sha256_of_file(path))
        for path in paths
    }
    return Manifest(step=step, metric=metric, files=files)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder; DamagedError where there is none that can be read."""
    path = folder / MANIFEST
    if not path.is_file():
        raise DamagedError(f"{path} is missing")
    try:
        content = json.loads(path.read_bytes())
        files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        manifest = Manifest(step=content["step"], metric=content["metric"], files=files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} is not a manifest ({error})") from error
    if content.get("format") != FORMAT:
        raise DamagedError(f"{path} has format {content.get('format')!r}, this version reads {FORMAT}")
    return manifest


def verify_folder(folder: Path, *, with_hashes: bool) -> Manifest:
    """The manifest, once every file that it lists is there with its size and, where asked, its hash.

    Files that it does not list are nobody's business. Raises DamagedError at the first difference.
    """
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"{path} is missing")
        num_bytes = path.stat().st_size
        if num_bytes != entry.num_bytes:
            raise DamagedError(f"{path} has {num_bytes} bytes, the manifest says {entry.num_bytes}")
        if with_hashes and sha256_of_file(path) != entry.sha256:
            raise DamagedError(f"{path} has other contents than when it was saved (its sha256 differs)")
    return manifest


def sha256_of_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
