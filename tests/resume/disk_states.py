"""What a run folder may hold when its process is killed: pictures of it at every write boundary. Kills nothing.

A killed process leaves on the disk exactly what it had written, so a picture taken at a boundary, put back later, is
the folder that a kill at that boundary would have left. One run thus shows all of its crashes.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proximo.checkpoint import atomic
from proximo.checkpoint.logs import JsonLines

EFFECTS = ("_make_folder", "_write_file", "_sync", "_rename", "_delete")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A folder at one moment."""

    moment: str
    """What was about to happen, was half done or had just been done."""
    files: Mapping[str, bytes | None]
    """Path below the folder -> contents; None for a folder."""

    def put_back(self, folder: Path) -> None:
        """Make `folder` what it was."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in self.files.items():
            if content is None:
                (folder / name).mkdir()
            else:
                (folder / name).write_bytes(content)

    @property
    def saved_step(self) -> int | None:
        """The step of the checkpoint that `latest` names."""
        content = self.files.get("checkpoints/latest")
        return None if content is None else int(content.decode().strip().removeprefix("step-"))

    @property
    def saved_lines(self) -> bytes:
        """The lines of metrics.jsonl up to that checkpoint, times and all: nothing that is saved is done again."""
        lines = (self.files.get("metrics.jsonl") or b"").splitlines(keepends=True)
        return b"" if self.saved_step is None else b"".join(lines[: self.saved_step + 1])

    @property
    def logged_lines(self) -> int:
        """Whole lines of metrics.jsonl."""
        return (self.files.get("metrics.jsonl") or b"").count(b"\n")


class Camera:
    """While its patches are in place, takes a picture of `folder` around everything that a run writes.

    Before and after each effect of `proximo.checkpoint.atomic`, with the effect half done where it can be; after each
    line of a log, and with half of the last line of a step. Equal states of the disk are kept once, whatever led to
    them: syncing, for one, changes nothing that a kill could leave. The weights of a checkpoint are written by a
    library; the picture after that has a twin in which they are cut off.
    """

    def __init__(self, folder: Path, patch: Callable[[Any, str, Any], None]) -> None:
        self.folder = folder
        self.pictures: dict[tuple[tuple[str, bytes | None], ...], Picture] = {}
        self.num_boundaries = 0
        for name in EFFECTS:
            patch(atomic, name, self._around(name, getattr(atomic, name)))
        patch(JsonLines, "append", self._around_append(JsonLines.append))

    def __iter__(self) -> Iterator[Picture]:
        return iter(self.pictures.values())

    def take(self, moment: str, changes: Mapping[str, bytes | None] | None = None) -> None:
        """Keep the folder as it is now, but for `changes`."""
        self.num_boundaries += 1
        files = {
            path.relative_to(self.folder).as_posix(): path.read_bytes() if path.is_file() else None
            for path in sorted(self.folder.rglob("*"))
        }
        files |= changes or {}
        self.pictures.setdefault(tuple(files.items()), Picture(moment=moment, files=files))

    def _around(self, name: str, really: Callable[..., None]) -> Callable[..., None]:
        def effect(path: Path, *given: Any) -> None:
            what = f"{name} {os.path.relpath(path, self.folder)}"
            self.take(f"before {what}")
            half = self._half(name, path, *given)
            if half:
                self.take(f"within {what}", half)
            really(path, *given)
            self.take(f"after {what}")

        return effect

    def _half(self, name: str, path: Path, *given: Any) -> dict[str, bytes | None]:
        """What differs when the effect is half done."""
        if name == "_write_file":
            return {path.relative_to(self.folder).as_posix(): given[0][: len(given[0]) // 2]}
        if name == "_make_folder" and path.name == "optimizer":
            files = (file for file in path.parent.rglob("*") if file.is_file())
            weights = max(files, key=lambda file: file.stat().st_size)
            return {weights.relative_to(self.folder).as_posix(): weights.read_bytes()[:1000]}
        return {}

    def _around_append(self, really: Callable[..., None]) -> Callable[..., None]:
        def append(log: JsonLines, record: Mapping[str, Any]) -> None:
            path = Path(log._file.name)
            before = path.read_bytes()
            really(log, record)
            line = path.read_bytes()[len(before) :]
            what = f"the line of step {record['step']} in {path.name}"
            if path.name == "metrics.jsonl":
                self.take(f"within {what}", {path.name: before + line[: len(line) // 2]})
            self.take(f"after {what}")

        return append
